"""Settings from the environment."""

import re
from pathlib import Path

import msgspec
import pytest

from app.host.processes import SUPERVISED
from app.settings.environment import REMOVED, RENAMED, load
from app.settings.schema import PREFIX, Settings, SettingsError


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("HOST", "0.0.0.0", "0.0.0.0"),  # noqa: S104
        ("PORT", "65535", 65535),
        ("SOCKET_MODE", "600", "600"),
        ("API_KEYS_FILE", "/etc/nereid/keys.toml", "/etc/nereid/keys.toml"),
        ("DRAIN_DELAY_SECONDS", "0", 0.0),
        ("DECODE_THREADS", "256", 256),
        ("MODEL", "null", "null"),
        ("TIMEOUT_SECONDS", "0.5", 0.5),
        ("MAX_TIMEOUT_SECONDS", "600", 600.0),
        ("LOG_LEVEL", "debug", "debug"),
        ("SLOW_REQUEST_MS", "250.5", 250.5),
        ("TRACING", "true", True),
    ],
)
def test_variable_sets_its_setting(name: str, text: str, value: object) -> None:
    """The text becomes the setting of that name, and no other setting changes."""
    assert load({PREFIX + name: text}) == msgspec.structs.replace(Settings(), **{name.lower(): value})


@pytest.mark.parametrize("name", ["PORT", "DIALECTS", "TRACING", "SLOW_REQUEST_MS"])
def test_empty_variable_counts_as_not_set(name: str) -> None:
    assert load({PREFIX + name: ""}) == Settings()


@pytest.mark.parametrize(("old", "new"), RENAMED.items())
def test_an_old_name_is_still_read(old: str, new: str) -> None:
    assert load({PREFIX + old: "7"}) == load({PREFIX + new: "7"}) == load({PREFIX + old: "8", PREFIX + new: "7"})
    assert load({PREFIX + old: "7", PREFIX + new: ""}) == load({PREFIX + new: "7"})


def test_removed_variables_are_told_with_what_to_do_instead() -> None:
    known = {name.upper() for name in Settings.__struct_fields__}
    assert not REMOVED.keys() & (known | RENAMED.keys())
    assert {name for text in REMOVED.values() for name in re.findall(f"{PREFIX}([A-Z_]+)", text)} <= known

    with pytest.raises(SettingsError) as caught:
        load({"NEREID_PROT": "1", "NEREID_SOCKET_FOLDER": "run", "NEREID_AGGREGATE": ""})
    assert str(caught.value) == "; ".join(f"NEREID_{name} was removed: {REMOVED[name]}" for name in ("AGGREGATE", "SOCKET_FOLDER"))


def test_variables_of_others_and_internal_ones_are_ignored() -> None:
    assert load({"PORT": "1", "HOME": "/", "XNEREID_PORT": "2", "nereid_port": "3", SUPERVISED: "4"}) == Settings()


def test_folders_are_in_the_current_one_if_it_has_a_model_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they are in the user's data directory; a variable sets either."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")

    def folders(environ: dict[str, str]) -> tuple[str, str]:
        settings = load(environ)
        return settings.model_repository, settings.triton_home

    users = "/home/someone/.local/share/nereid"
    assert folders({}) == folders({"XDG_DATA_HOME": ""}) == (f"{users}/model_repository", f"{users}/.triton")
    assert folders({"XDG_DATA_HOME": "/data"}) == ("/data/nereid/model_repository", "/data/nereid/.triton")
    assert folders({"NEREID_MODEL_REPOSITORY": "/models"}) == ("/models", f"{users}/.triton")
    assert folders({"NEREID_TRITON_HOME": "/triton"}) == (f"{users}/model_repository", "/triton")

    (tmp_path / "model_repository").mkdir()
    assert folders({"XDG_DATA_HOME": "/data"}) == ("model_repository", ".triton")
    assert folders({"NEREID_TRITON_HOME": "/triton"}) == ("model_repository", "/triton")


@pytest.mark.parametrize("name", ["NEREID_PROT", "NEREID_", "NEREID_TRITON_URL", "NEREID__PORT"])
def test_unknown_variable_is_named(name: str) -> None:
    with pytest.raises(SettingsError, match=f"^{name} is not a setting; `nereid settings` lists all$"):
        load({"NEREID_PORT": "4603", name: "1"})


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("PORT", "0 65536 http"),
        ("SOCKET_MODE", "0660 668 rw-rw----"),
        ("INSTANCES", "-1 65"),
        ("TRITON_PORTS", "-1"),
        ("WORKERS", "-1 1.5 257"),
        ("DRAIN_DELAY_SECONDS", "-1 601"),
        ("DECODE_THREADS", "0"),
        ("TIMEOUT_SECONDS", "0 601 nan 10s"),
        ("SLOW_REQUEST_MS", "-1"),
        ("TRACING", "on"),
        ("BODY_SECONDS", "3601"),
        ("MAX_UPLOADS", "0"),
        ("MAX_FILE_SIZE_MB", "0 inf"),
        ("LOG_LEVEL", "INFO"),
    ],
)
def test_invalid_value_is_named(name: str, values: str) -> None:
    """A value of the wrong type or out of range is rejected, and the message begins with the variable."""
    for text in values.split():
        with pytest.raises(SettingsError, match=f"^{PREFIX}{name}: [A-Z]"):
            load({PREFIX + name: text})


@pytest.mark.parametrize(
    ("name", "text", "choices"),
    [
        ("TRANSPORT", "tcp", "auto, shm, inline"),
        ("LOG_LEVEL", "INFO", "debug, info, warning, error"),
        ("TRACING", "on", "true, false"),
    ],
)
def test_values_to_choose_from_are_named(name: str, text: str, choices: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load({PREFIX + name: text})
    assert str(caught.value) == f"{PREFIX}{name}: Expected one of {choices}; got '{text}'"


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEREID_PORT", "8080")

    assert load().port == 8080
