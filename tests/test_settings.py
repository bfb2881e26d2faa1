"""Settings from the environment, what follows from them, and which do not fit together."""

from pathlib import Path

import msgspec
import pytest

from app.feature import check, settings_kind
from app.feature import read_settings as load
from app.host.processes import SUPERVISED
from app.settings.schema import PREFIX, Settings, SettingsError
from app.settings.task_models import task_models


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [("PORT", "65535", 65535), ("SOCKET_MODE", "600", "600"), ("MODEL", "null", "null"), ("TRACING", "true", True)],
)
def test_variable_sets_its_setting_and_only_if_it_is_not_empty(name: str, text: str, value: object) -> None:
    assert load({PREFIX + name: text}) == msgspec.structs.replace(settings_kind()(), **{name.lower(): value})
    assert load({PREFIX + name: ""}) == settings_kind()()


def test_variables_of_others_and_internal_ones_are_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NEREID_PORT", "8080")
    others = {"PORT": "1", "HOME": "/", "XNEREID_PORT": "2", "nereid_port": "3", "NEREID_KEY": "one.secret"}
    # Kubernetes describes the services `nereid` and `nereid-triton` so.
    others |= {"NEREID_PORT": "tcp://10.96.0.7:4603", "NEREID_SERVICE_HOST": "10.96.0.7", "NEREID_SERVICE_PORT_HTTP": "4603"}
    others |= {"NEREID_PORT_4603_TCP_ADDR": "10.96.0.7", "NEREID_TRITON_PORT": "tcp://10.96.0.8:8001"}
    assert load({**others, SUPERVISED: "4"}) == settings_kind()()
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


def test_unknown_variable_is_named() -> None:
    with pytest.raises(SettingsError, match=r"^NEREID_ is not a setting; `nereid settings` lists them all$"):
        load({"NEREID_PORT": "4603", PREFIX: "1"})


@pytest.mark.parametrize(
    ("name", "values", "expected"),
    [
        ("PORT", "0 65536 http", "a whole number from 1 to 65535"),
        ("SOCKET_MODE", "0660 668 rw-rw----", "three digits from 0 to 7, such as 660"),
        ("HOST", "[::] [2001:db8::7]", "an address or a name, such as :: or 127.0.0.1, without brackets"),
        ("TRANSPORT", "tcp", "one of 'auto', 'inline', 'shm'"),
        ("TRACING", "on", "true or false"),
        ("TIMEOUT_SECONDS", "0 601 nan 10s", "a number of seconds above 0, up to 600"),
        ("SLOW_REQUEST_MS", "-1 1s", "a number of milliseconds from 0 to 10000000"),
    ],
)
def test_invalid_value_is_named_with_what_is_expected(name: str, values: str, expected: str) -> None:
    for text in values.split():
        with pytest.raises(SettingsError) as caught:
            load({PREFIX + name: text})
        assert str(caught.value) == f"{PREFIX}{name}: Expected {expected}; got '{text}'"


@pytest.mark.parametrize(
    ("given", "name", "value"),
    [
        ({"max_megapixels": 20, "max_megapixels_non_jpeg": 25}, "max_pixels_non_jpeg", 20_000_000),
        ({"body_seconds": 30, "timeout_seconds": 0.5, "max_timeout_seconds": 20}, "drain_seconds", 55),
        ({"body_seconds": 0.5, "timeout_seconds": 30, "max_timeout_seconds": 20}, "drain_seconds", 36),
        ({"dialects": "kserve, nim,,kserve"}, "dialect_names", ["kserve", "nim"]),
        ({}, "sockets", [None]),  # for host and port
        ({"host": "0.0.0.0"}, "local_url", "http://127.0.0.1:4603"),  # noqa: S104 - nobody listens
        ({"host": "::"}, "local_url", "http://127.0.0.1:4603"),
        ({"host": "2001:db8::7"}, "local_url", "http://[2001:db8::7]:4603"),
    ],
)
def test_limits_and_addresses_follow_from_settings(given: dict[str, object], name: str, value: object) -> None:
    assert getattr(msgspec.structs.replace(Settings(), **given), name) == value


def test_models_of_tasks_that_are_not_named_keep_their_defaults() -> None:
    named = task_models(Settings(task_models=" pose = people, obb=ships,"))
    assert named == task_models(Settings()) | {"pose": "people", "obb": "ships"}
    assert len(named) == 7


REMOTE = {"TRITON_ENDPOINTS": "triton:8001"}
LOADS = {**REMOTE, "TRITON_LOADS_MODELS": "true"}


def complain(environ: dict[str, str]) -> str:
    """Return the message for settings that break a rule; empty if they break none."""
    try:
        check(load({PREFIX + name: value for name, value in environ.items()}))
    except SettingsError as error:
        return str(error).removeprefix(PREFIX)
    return ""


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, ""),
        ({"TRITON_ENDPOINTS": "a:8001, b:8001,a:8001"}, "TRITON_ENDPOINTS: an address is there twice"),
        ({"WORKER_MAX_AGE_SECONDS": "59"}, "WORKER_MAX_AGE_SECONDS: Expected 0, or at least 60 seconds; got 59"),
        ({"TASK_MODELS": "pose=people,detection=mine"}, "TASK_MODELS: 'detection=mine' is not one of segmentation, pose, obb, "),
        (
            {"TRITON_TLS_FOLDER": "tls"},
            "TRITON_TLS_FOLDER: NEREID_TRITON_ENDPOINTS names no Triton, and the embedded one has no TLS",
        ),
        ({"LOADED_MODELS": "8", **REMOTE}, "LOADED_MODELS: it needs NEREID_TRITON_LOADS_MODELS, or the embedded Triton"),
        ({"LOADED_MODELS": "8", "TRITON_PORTS": "8000"}, "LOADED_MODELS: with NEREID_TRITON_PORTS, the embedded Triton loads no"),
        ({"LOADED_MODELS": "8", **LOADS}, ""),
        ({"CACHE": "memory", **REMOTE}, "CACHE: nobody tells here which networks these Tritons run; it needs "),
        ({"CACHE": "memory", **LOADS}, ""),
        ({"DIALECTS": "nim,none"}, "DIALECTS: Expected some of "),
        ({"TRITON_PORTS": "4602"}, "PORT: 4603 is one of the two ports from NEREID_TRITON_PORTS on"),
        ({"TRITON_PORTS": "4603", **REMOTE}, ""),  # which do not use it
        ({"TRITON_PORTS": "4603", "SOCKET": "api.sock"}, ""),
    ],
)
def test_settings_that_do_not_fit_together_are_rejected(settings: dict[str, str], message: str) -> None:
    assert complain(settings).startswith(message)
    assert bool(complain(settings)) is bool(message)


FRIGATE = ["tcp://127.0.0.1:5555", "tcp://localhost:5555", "tcp://192.168.1.7:1", "tcp://[fd00::7]:65535", "ipc:///run/zmq"]
NOT_FRIGATE = """
tcp://0.0.0.0:5555 tcp://8.8.8.8:5555 tcp://[::]:5555 tcp://[2001:db8::7]:5555 tcp://nereid:5555 tcp://127.0.0.1
tcp://127.0.0.1:0 tcp://127.0.0.1:65536 tcp://127.0.0.1:* tcp://127.0.0.256:5555 tcp://::1:5555 tcp://[::ffff:8.8.8.8]:5555
tcp://127.0.0.1:5555;8.8.8.8:5555 ipc://@abstract ipc:///
"""
TRITONS = ["gpu_1.example.org:8001", "[2001:db8::7]:65535", "a:8001,b:8001", "dns:///triton.svc:8001, [::1]:1, unix:/run/triton:1"]
NOT_TRITONS = """
http://triton:8001 user:secret@triton:8001 triton :8001 triton:0 triton:65536 triton:grpc triton:8001/v2 2001:db8::7:8001
dns:///triton dns://resolver/triton:8001 unix:triton.sock a:8001, a:8001;b:8001
"""
HOSTS = ["", "*", "*.example.org, b.example.net:8443", "Images.Example.ORG", "*:8443", "a_b.example.org,"]
NOT_HOSTS = "https://a.org a.org/x 10.0.0.1 [::1] a.*.org *a.org ** a.org:0 a.org:65536 a.org: bücher.de"
ORIGINS = ["*", "https://app.example.org, HTTP://localhost:3000,", "http://[::1]:8044", "capacitor://localhost"]
NOT_ORIGINS = """
app.example.org https://app.example.org/ https://*.example.org https://app.example.org:443 http://a:80 http://a:0 http://a:65536
https:// https://bücher.de https://user@a.org *,https://a.org null
"""
PROXIES = ["127.0.0.1, 10.1.0.0/16,,2001:db8::/32"]
NOT_PROXIES = "proxy.example.org 10.0.0.1/8 10.0.0.0/33 127.0.0.1:80 *"
DATABASES = ["postgresql://nereid@db/nereid", "postgresql:///nereid?host=/run/postgresql"]
NOT_DATABASES = "postgresql://db postgresql://u:secret@db:99999/nereid postgresql:///nereid postgres://[::/nereid"


@pytest.mark.parametrize(
    ("name", "good", "bad", "expected"),
    [
        ("FRIGATE_ZMQ", FRIGATE, NOT_FRIGATE, "tcp://address:port with a loopback or private IP address"),
        ("TRITON_ENDPOINTS", TRITONS, NOT_TRITONS, "host:port of Triton's gRPC endpoint, such as triton.example.org:8001 "),
        ("URL_HOSTS", HOSTS, NOT_HOSTS, "names of hosts such as "),
        ("CORS_ORIGINS", ORIGINS, NOT_ORIGINS, "origins as browsers send them"),
        ("TRUSTED_PROXIES", PROXIES, NOT_PROXIES, "addresses or networks such as "),
        ("DATABASE_URL", DATABASES, NOT_DATABASES, "host, perhaps a port, and the name of a database: "),
    ],
)
def test_addresses_have_a_form_in_which_they_are_found(name: str, good: list[str], bad: str, expected: str) -> None:
    """The message shows the right form, and nothing that may be secret."""
    assert {address: complain({name: address}) for address in good} == dict.fromkeys(good, "")
    for address in bad.split():
        message = complain({name: address})
        assert message.startswith(f"{name}: Expected {expected}"), address
        assert "secret" not in message
