"""Settings that are valid one by one, but not together."""

import pytest

from app.settings.environment import load
from app.settings.rules import check
from app.settings.schema import SettingsError

REMOTE = {"NEREID_TRITON_ENDPOINTS": "triton:8001"}


def complaint(environ: dict[str, str]) -> str:
    """Return the error message for settings that break a rule."""
    with pytest.raises(SettingsError) as caught:
        check(load(environ))
    return str(caught.value)


@pytest.mark.parametrize(
    ("variable", "value", "rule"),
    [
        ("TRITON_ENDPOINTS", "a:8001, b:8001,a:8001", "an address is there twice"),
        ("WORKER_MAX_AGE_SECONDS", "1", "Expected 0, or at least 60 seconds; got 1"),
        ("WORKER_MAX_AGE_SECONDS", "59", "Expected 0, or at least 60 seconds; got 59"),
        (
            "TASK_MODELS",
            "pose=people,detection=mine",
            (
                "'detection=mine' is not one of segmentation, pose, obb, classification, text_detection, text_recognition, "
                "embedding, followed by = and the name of a model"
            ),
        ),
        *(
            (
                "DATABASE_URL",
                url,
                "Expected host, perhaps a port, and the name of a database: postgresql://nereid@db.example.org/nereid",
            )
            for url in ("postgresql://db", "postgresql://u:p@db:99999/nereid", "postgresql:///nereid", "postgres://[::/nereid")
        ),
        ("TRITON_TLS_FOLDER", "tls", "NEREID_TRITON_ENDPOINTS names no Triton, and the embedded one has no TLS"),
    ],
)
def test_setting_without_effect_or_with_a_bad_one_is_rejected(variable: str, value: str, rule: str) -> None:
    assert complaint({f"NEREID_{variable}": value}) == f"NEREID_{variable}: {rule}"


@pytest.mark.parametrize(
    ("others", "rule"),
    [
        (REMOTE, "it needs NEREID_TRITON_LOADS_MODELS, or the embedded Triton"),
        ({"NEREID_TRITON_PORTS": "8000"}, "with NEREID_TRITON_PORTS, the embedded Triton loads no models while it runs"),
    ],
)
def test_models_are_loaded_on_demand_where_tritons_load_any(others: dict[str, str], rule: str) -> None:
    assert complaint({**others, "NEREID_LOADED_MODELS": "8"}) == f"NEREID_LOADED_MODELS: {rule}"
    check(load({**REMOTE, "NEREID_LOADED_MODELS": "8", "NEREID_TRITON_LOADS_MODELS": "true"}))


@pytest.mark.parametrize(
    "address",
    [
        "tcp://127.0.0.1:5555",
        "tcp://localhost:5555",
        "tcp://192.168.1.7:1",
        "tcp://[::1]:5555",
        "tcp://[fd00::7]:65535",
        "ipc:///run/nereid/zmq",
    ],
)
def test_frigate_reaches_a_loopback_or_private_address(address: str) -> None:
    check(load({"NEREID_FRIGATE_ZMQ": address}))


PUBLIC = """
tcp://0.0.0.0:5555 tcp://*:5555 tcp://192.0.2.7:5555 tcp://8.8.8.8:5555 tcp://[::]:5555 tcp://[2001:db8::7]:5555 tcp://eth0:5555
tcp://nereid:5555 tcp://127.0.0.1 tcp://127.0.0.1:0 tcp://127.0.0.1:65536 tcp://127.0.0.1:* tcp://127.0.0.256:5555
tcp://::1:5555 tcp://[::ffff:8.8.8.8]:5555 tcp://127.0.0.1:5555;8.8.8.8:5555 ipc://relative ipc://@abstract ipc:///
"""


@pytest.mark.parametrize("address", PUBLIC.split())
def test_other_addresses_for_frigate_are_rejected(address: str) -> None:
    assert "Expected tcp://address:port with a loopback or private IP address" in complaint({"NEREID_FRIGATE_ZMQ": address})


@pytest.mark.parametrize("loads", ["false", "true"])
def test_a_cache_needs_to_know_what_the_tritons_run(loads: str) -> None:
    given = {**REMOTE, "NEREID_CACHE": "memory", "NEREID_TRITON_LOADS_MODELS": loads}
    if loads == "true":
        check(load(given))
    else:
        assert complaint(given).startswith("NEREID_CACHE: nobody tells here which networks these Tritons run; it needs ")
    check(load({"NEREID_CACHE": "memory"}))


def test_defaults_break_no_rule() -> None:
    check(load({}))


@pytest.mark.parametrize(
    "address",
    [
        "triton:8001",
        "192.0.2.7:1",
        "[2001:db8::7]:65535",
        "gpu_1.example.org:8001",
        "a:8001,b:8001",
        "dns:///triton.default.svc:8001, [::1]:8001, unix:/run/triton/triton:1",
    ],
)
def test_address_of_triton_has_a_host_and_a_port(address: str) -> None:
    check(load({"NEREID_TRITON_ENDPOINTS": address}))


ADDRESSES = """
http://triton:8001 grpc://triton:8001 https://user:secret@triton:8001/ user:secret@triton:8001 triton triton: :8001 triton:0
triton:65536 triton:grpc triton:8001/v2 2001:db8::7:8001 dns:///triton dns://resolver/triton:8001
unix:triton.sock a:8001, ,a:8001 a:8001,b a:8001;b:8001
"""


@pytest.mark.parametrize("address", [*ADDRESSES.split(), "triton :8001", "unix:/a b"])
def test_other_forms_of_an_address_are_rejected(address: str) -> None:
    """Triton would never be found there; the message shows the right form, and nothing that may be secret."""
    message = complaint({"NEREID_TRITON_ENDPOINTS": address})

    assert message.startswith(
        "NEREID_TRITON_ENDPOINTS: Expected host:port of Triton's gRPC endpoint, such as triton.example.org:8001 "
    )
    assert ("; got " in message) is ("@" not in address)
    assert "secret" not in message


@pytest.mark.parametrize("first", [4602, 4603])
def test_ports_that_collide_are_named(first: int) -> None:
    assert complaint({"NEREID_TRITON_PORTS": str(first)}) == (
        "NEREID_PORT: 4603 is one of the two ports from NEREID_TRITON_PORTS on"
    )


@pytest.mark.parametrize(
    "environ",
    [
        {**REMOTE, "NEREID_TRITON_PORTS": "4603"},
        {"NEREID_SOCKET": "api.sock", "NEREID_TRITON_PORTS": "4603"},
        {"NEREID_INSTANCES": "2", "NEREID_TRITON_PORTS": "4603"},
        {"NEREID_TRITON_PORTS": "4604"},
    ],
)
def test_ports_that_are_not_used_do_not_collide(environ: dict[str, str]) -> None:
    """Those of an embedded Triton that does not run, and that of an API on unix sockets."""
    check(load(environ))


@pytest.mark.parametrize(
    "hosts",
    ["", "images.example.org", "*", "*.example.org, b.example.net:8443", "Images.Example.ORG", "*:8443", "a_b.example.org,"],
)
def test_hosts_of_images_are_names(hosts: str) -> None:
    check(load({"NEREID_URL_HOSTS": hosts}))


HOSTS = "https://a.org a.org/x 10.0.0.1 [::1] a.*.org *a.org ** a.org:0 a.org:65536 a.org: bücher.de"


@pytest.mark.parametrize("hosts", [*HOSTS.split(), "a.org b.org"])
def test_other_forms_of_hosts_are_rejected(hosts: str) -> None:
    """Such patterns would never match."""
    message = complaint({"NEREID_URL_HOSTS": f"a.example.org,{hosts}"})

    assert message.startswith("NEREID_URL_HOSTS: Expected names of hosts such as ")
    assert message.endswith(f"; got {hosts!r}")


@pytest.mark.parametrize("proxies", ["proxy.example.org", "10.0.0.1/8", "10.0.0.0/33", "127.0.0.1:80", "*"])
def test_proxies_are_addresses_or_networks(proxies: str) -> None:
    """A name could mean another machine tomorrow, and nobody trusts everybody by mistake."""
    assert complaint({"NEREID_TRUSTED_PROXIES": proxies}).startswith(
        "NEREID_TRUSTED_PROXIES: Expected addresses or networks such as "
    )


@pytest.mark.parametrize(
    "origins", ["*", "https://app.example.org, HTTP://localhost:3000,", "http://[::1]:8044", "capacitor://localhost"]
)
def test_origins_have_a_scheme_and_a_host(origins: str) -> None:
    check(load({"NEREID_CORS_ORIGINS": origins}))


ORIGINS = (
    "app.example.org https://app.example.org/ https://*.example.org https://app.example.org:443 http://a:80 http://a:0 "
    "http://a:65536 https:// https://bücher.de https://user@a.org *,https://a.org null"
)


@pytest.mark.parametrize("origins", ORIGINS.split())
def test_other_forms_of_origins_are_rejected(origins: str) -> None:
    """No browser sends them."""
    assert complaint({"NEREID_CORS_ORIGINS": origins}).startswith("NEREID_CORS_ORIGINS: Expected origins as browsers send them")
