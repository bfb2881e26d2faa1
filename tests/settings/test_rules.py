"""Settings that are valid one by one, but not together."""

import pytest

from app.settings.environment import load
from app.settings.rules import check
from app.settings.schema import PREFIX, SettingsError

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
        ({"WORKER_MAX_AGE_SECONDS": "60"}, ""),
        ({"TASK_MODELS": "pose=people,detection=mine"}, "TASK_MODELS: 'detection=mine' is not one of segmentation, pose, obb, "),
        ({"TASK_MODELS": "pose="}, "TASK_MODELS: 'pose=' is not one of "),
        (
            {"TRITON_TLS_FOLDER": "tls"},
            "TRITON_TLS_FOLDER: NEREID_TRITON_ENDPOINTS names no Triton, and the embedded one has no TLS",
        ),
        ({"TRITON_TLS_FOLDER": "tls", **REMOTE}, ""),
        ({"LOADED_MODELS": "8", **REMOTE}, "LOADED_MODELS: it needs NEREID_TRITON_LOADS_MODELS, or the embedded Triton"),
        ({"LOADED_MODELS": "8", "TRITON_PORTS": "8000"}, "LOADED_MODELS: with NEREID_TRITON_PORTS, the embedded Triton loads no"),
        ({"LOADED_MODELS": "8", **LOADS}, ""),
        ({"CACHE": "memory", **REMOTE}, "CACHE: nobody tells here which networks these Tritons run; it needs "),
        ({"CACHE": "memory", **LOADS}, ""),
        ({"CACHE": "memory"}, ""),
        ({"TRITON_ENDPOINTS": "triton :8001"}, "TRITON_ENDPOINTS: Expected host:port "),
        ({"TRITON_ENDPOINTS": "unix:/a b"}, "TRITON_ENDPOINTS: Expected host:port "),
        ({"URL_HOSTS": "a.org b.org"}, "URL_HOSTS: Expected names of hosts "),
        ({"DIALECTS": "nim,none"}, "DIALECTS: Expected some of "),
        ({"TRITON_PORTS": "4602"}, "PORT: 4603 is one of the two ports from NEREID_TRITON_PORTS on"),
        ({"TRITON_PORTS": "4603"}, "PORT: 4603 is one of the two ports from NEREID_TRITON_PORTS on"),
        ({"TRITON_PORTS": "4604"}, ""),
        ({"TRITON_PORTS": "4603", **REMOTE}, ""),  # which do not use it
        ({"TRITON_PORTS": "4603", "SOCKET": "api.sock"}, ""),
        ({"TRITON_PORTS": "4603", "INSTANCES": "2"}, ""),
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
