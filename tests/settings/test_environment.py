"""Settings from the environment."""

import errno
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from app.host.processes import SUPERVISED
from app.settings.environment import load
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
    assert load({PREFIX + name: text}) == msgspec.structs.replace(Settings(), **{name.lower(): value})


@pytest.mark.parametrize("name", ["PORT", "DIALECTS", "TRACING", "SLOW_REQUEST_MS"])
def test_empty_variable_counts_as_not_set(name: str) -> None:
    assert load({PREFIX + name: ""}) == Settings()


def test_variables_of_others_and_internal_ones_are_ignored() -> None:
    others = {"PORT": "1", "HOME": "/", "XNEREID_PORT": "2", "nereid_port": "3", "NEREID_KEY": "one.secret"}
    assert load({**others, SUPERVISED: "4"}) == Settings()


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


def test_folders_are_the_users_where_the_current_one_may_not_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `sudo -u nereid` in a folder of root."""
    monkeypatch.setattr("os.stat", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))

    assert load({"XDG_DATA_HOME": "/data"}).model_repository == "/data/nereid/model_repository"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("PROT", "; did you mean NEREID_PORT?"),
        ("TIMEOUT", "; did you mean NEREID_TIMEOUT_SECONDS?"),
        ("KEYS_FILE", "; did you mean NEREID_API_KEYS_FILE?"),
        ("_PORT", "; did you mean NEREID_PORT?"),
        ("", ";"),
        ("QUIET", ";"),
    ],
)
def test_unknown_variable_is_named(name: str, hint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load({"NEREID_PORT": "4603", PREFIX + name: "1"})
    assert str(caught.value) == f"{PREFIX}{name} is not a setting{hint} `nereid settings` lists them all"


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
    for text in values.split():
        with pytest.raises(SettingsError, match=f"^{PREFIX}{name}: Expected .*; got '{text}'$"):
            load({PREFIX + name: text})


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("TRANSPORT", "tcp", "one of 'auto', 'inline', 'shm'"),
        ("TRACING", "on", "true or false"),
        ("PORT", "http", "a whole number from 1 to 65535"),
        ("TIMEOUT_SECONDS", "10s", "a number of seconds above 0, up to 600"),
        ("SLOW_REQUEST_MS", "1s", "a number of milliseconds from 0 to 10000000"),
        ("MAX_FILE_SIZE_MB", "0", "a number of MiB above 0, up to 1024"),
        ("WORKER_MAX_MEMORY_MB", "1GB", "a whole number of MiB from 0 to 1048576"),
        ("MAX_MEGAPIXELS", "500", "a number of megapixels above 0, up to 178"),
        ("SOCKET_MODE", "0660", "three digits from 0 to 7, such as 660"),
    ],
)
def test_error_of_a_value_has_the_expected_unit(name: str, text: str, expected: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load({PREFIX + name: text})
    assert str(caught.value) == f"{PREFIX}{name}: Expected {expected}; got '{text}'"


def test_a_value_that_may_contain_a_password_is_not_quoted() -> None:
    with pytest.raises(SettingsError, match=r"^NEREID_DATABASE_URL: Expected a URL") as caught:
        load({"NEREID_DATABASE_URL": "mysql://user:secret@db/nereid"})
    assert "secret" not in str(caught.value)


def test_only_the_beginning_of_a_long_value_is_quoted() -> None:
    with pytest.raises(SettingsError) as caught:
        load({"NEREID_SOCKET": "x" * 101})
    assert str(caught.value) == f"NEREID_SOCKET: Expected at most 100 characters; got '{'x' * 64}'"


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEREID_PORT", "8080")

    assert load().port == 8080
