"""Settings from the environment, and what follows from them."""

import errno
from pathlib import Path
from unittest.mock import Mock

import msgspec
import pytest

from app.host.processes import SUPERVISED
from app.settings.environment import load
from app.settings.schema import PREFIX, Settings, SettingsError
from app.settings.table import render
from app.settings.task_models import task_models


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("PORT", "65535", 65535),
        ("WORKERS", "256", 256),
        ("SOCKET_MODE", "600", "600"),
        ("MODEL", "null", "null"),
        ("TIMEOUT_SECONDS", "0.5", 0.5),
        ("LOG_LEVEL", "debug", "debug"),
        ("SLOW_REQUEST_MS", "250.5", 250.5),
        ("TRACING", "true", True),
    ],
)
def test_variable_sets_its_setting_and_only_if_it_is_not_empty(name: str, text: str, value: object) -> None:
    assert load({PREFIX + name: text}) == msgspec.structs.replace(Settings(), **{name.lower(): value})
    assert load({PREFIX + name: ""}) == Settings()


def test_variables_of_others_and_internal_ones_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEREID_PORT", "8080")
    others = {"PORT": "1", "HOME": "/", "XNEREID_PORT": "2", "nereid_port": "3", "NEREID_KEY": "one.secret"}
    assert load({**others, SUPERVISED: "4"}) == Settings()
    assert load().port == 8080  # of this process


def test_folders_are_in_the_current_one_if_it_has_a_model_repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise they are in the user's data directory; a variable sets either."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")

    def folders(**environ: str) -> tuple[str, str]:
        settings = load(environ)
        return settings.model_repository, settings.triton_home

    users = "/home/someone/.local/share/nereid"
    assert folders() == folders(XDG_DATA_HOME="") == (f"{users}/model_repository", f"{users}/.triton")
    assert folders(XDG_DATA_HOME="/data") == ("/data/nereid/model_repository", "/data/nereid/.triton")
    assert folders(NEREID_MODEL_REPOSITORY="/models") == ("/models", f"{users}/.triton")
    (tmp_path / "model_repository").mkdir()
    assert folders(XDG_DATA_HOME="/data", NEREID_TRITON_HOME="/triton") == ("model_repository", "/triton")


def test_folders_are_the_users_where_the_current_one_may_not_be_entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after `sudo -u nereid` in a folder of root."""
    monkeypatch.setattr("os.stat", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
    assert load({"XDG_DATA_HOME": "/data"}).model_repository == "/data/nereid/model_repository"


@pytest.mark.parametrize(
    ("name", "hint"), [("PROT", "; did you mean NEREID_PORT?"), ("_PORT", "; did you mean NEREID_PORT?"), ("", ";"), ("QUIET", ";")]
)
def test_unknown_variable_is_named(name: str, hint: str) -> None:
    with pytest.raises(SettingsError) as caught:
        load({"NEREID_PORT": "4603", PREFIX + name: "1"})
    assert str(caught.value) == f"{PREFIX}{name} is not a setting{hint} `nereid settings` lists them all"


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("PORT", "0 65536 http", "a whole number from 1 to 65535"),
        ("WORKERS", "-1 1.5 257", "a whole number from 0 to 256"),
        ("SOCKET_MODE", "0660 668 rw-rw----", "three digits from 0 to 7, such as 660"),
        ("TRANSPORT", "tcp", "one of 'auto', 'inline', 'shm'"),
        ("TRACING", "on", "true or false"),
        ("TIMEOUT_SECONDS", "0 601 nan 10s", "a number of seconds above 0, up to 600"),
        ("SLOW_REQUEST_MS", "-1 1s", "a number of milliseconds from 0 to 10000000"),
        ("MAX_FILE_SIZE_MB", "0 inf", "a number of MiB above 0, up to 1024"),
        ("MAX_MEGAPIXELS", "500", "a number of megapixels above 0, up to 178"),
    ],
)
def test_invalid_value_is_named_with_what_is_expected(name: str, values: str, expected: str) -> None:
    for text in values.split():
        with pytest.raises(SettingsError) as caught:
            load({PREFIX + name: text})
        assert str(caught.value) == f"{PREFIX}{name}: Expected {expected}; got '{text}'"


def test_only_the_beginning_of_a_long_value_is_quoted_and_no_password() -> None:
    with pytest.raises(SettingsError) as caught:
        load({"NEREID_SOCKET": "x" * 101})
    assert str(caught.value) == f"NEREID_SOCKET: Expected at most 100 characters; got '{'x' * 64}'"
    with pytest.raises(SettingsError, match=r"^NEREID_DATABASE_URL: Expected a URL") as caught:
        load({"NEREID_DATABASE_URL": "mysql://user:secret@db/nereid"})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"triton_home": "/srv", "triton_endpoints": "triton:8001"}, "triton_address", "triton:8001"),
        ({"triton_control_key_file": "/etc/key"}, "control_key_path", Path("/etc/key")),
        ({"max_file_size_mb": 1.5}, "max_body_bytes", 1572864),
        ({"max_megapixels": 100, "max_megapixels_non_jpeg": 30}, "max_pixels_non_jpeg", 30_000_000),
        ({"max_megapixels": 20, "max_megapixels_non_jpeg": 25}, "max_pixels_non_jpeg", 20_000_000),
        ({"body_seconds": 30, "timeout_seconds": 0.5, "max_timeout_seconds": 20}, "drain_seconds", 55),
        ({"body_seconds": 0.5, "timeout_seconds": 30, "max_timeout_seconds": 20}, "drain_seconds", 36),
        ({"dialects": "none"}, "dialect_names", []),
        ({"dialects": "kserve, nim,,kserve"}, "dialect_names", ["kserve", "nim"]),
        ({"socket": "/a/api.sock"}, "sockets", [Path("/a/api.sock")]),
        ({}, "sockets", [None]),  # for host and port
        ({"host": "0.0.0.0"}, "local_url", "http://127.0.0.1:4603"),  # noqa: S104 - nobody listens
        ({"host": "::"}, "local_url", "http://[::1]:4603"),
    ],
)
def test_limits_and_addresses_follow_from_settings(given: dict[str, object], name: str, value: object) -> None:
    assert getattr(msgspec.structs.replace(Settings(), **given), name) == value


def test_several_instances_have_numbered_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their folder is resolved, because instances are told the path."""
    monkeypatch.chdir(tmp_path)
    paths = [tmp_path / "sockets" / f"nereid-{number}.sock" for number in (1, 2)]
    assert Settings(instances=2, socket="sockets").sockets == paths
    assert Settings(instances=1).sockets == [tmp_path / "run" / "nereid-1.sock"]


def test_models_of_tasks_that_are_not_named_keep_their_defaults() -> None:
    named = task_models(Settings(task_models=" pose = people, obb=ships,"))
    assert named == task_models(Settings()) | {"pose": "people", "obb": "ships"}
    assert len(named) == 7


def test_table_has_a_row_for_each_setting() -> None:
    lines = render().splitlines()
    assert lines[2] == "| `NEREID_HOST` | `127.0.0.1` | Address the API listens on. |"
    assert [line.split("`")[1] for line in lines[2:]] == [PREFIX + name.upper() for name in Settings.__struct_fields__]
    assert all(line.count(" | ") == 2 and line.endswith(". |") for line in lines[2:])
    assert any(line.startswith("| `NEREID_TRACING` | `false` | ") for line in lines)
    assert any(line.startswith("| `NEREID_TRITON_ENDPOINTS` |  | gRPC endpoints of running Tritons") for line in lines)
