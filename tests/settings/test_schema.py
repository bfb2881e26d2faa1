"""What follows from the settings."""

from pathlib import Path

import pytest

from app.settings.environment import load
from app.settings.schema import PREFIX, Settings
from app.settings.table import render


def test_empty_environment_gives_the_defaults() -> None:
    settings = load({})

    assert settings == Settings()
    assert (settings.host, settings.port, settings.workers, settings.model) == ("127.0.0.1", 4603, 0, "yolo11n")
    assert settings.triton_ports == 0


def test_triton_is_the_embedded_one_unless_another_is_named() -> None:
    assert load({}).triton_address == f"unix:{Settings().triton_folder}/triton:1"
    assert load({"NEREID_TRITON_HOME": "/srv"}).triton_address == Settings(triton_home="/srv").triton_address
    assert load({"NEREID_TRITON_ENDPOINTS": "triton:8001"}).triton_address == "triton:8001"


def test_control_key_is_in_a_file() -> None:
    assert load({}).control_key_path is None
    assert load({"NEREID_TRITON_CONTROL_KEY_FILE": "/etc/key"}).control_key_path == Path("/etc/key")


@pytest.mark.parametrize(
    ("body", "usual", "most", "seconds"),
    [(30.0, 5.0, 20.0, 55), (30.0, 5.0, 0.5, 40), (1.0, 0.2, 1.1, 8), (0.5, 600.0, 600.0, 606)],
)
def test_requests_have_the_time_to_end_that_any_of_them_may_take(body: float, usual: float, most: float, seconds: int) -> None:
    """To receive the body, the longer one of the deadlines, and some seconds more for the rest."""
    settings = Settings(body_seconds=body, timeout_seconds=usual, max_timeout_seconds=most)

    assert settings.drain_seconds == seconds


def test_limits_are_whole_bytes_and_pixels() -> None:
    settings = load({"NEREID_MAX_FILE_SIZE_MB": "1.5", "NEREID_MAX_MEGAPIXELS": "0.5"})

    assert (settings.max_body_bytes, settings.max_pixels) == (1572864, 500000)


@pytest.mark.parametrize(("most", "non_jpeg", "pixels"), [("100", "30", 30_000_000), ("20", "25", 20_000_000)])
def test_no_image_has_more_pixels_than_the_general_limit(most: str, non_jpeg: str, pixels: int) -> None:
    settings = load({"NEREID_MAX_MEGAPIXELS": most, "NEREID_MAX_MEGAPIXELS_NON_JPEG": non_jpeg})

    assert settings.max_pixels_non_jpeg == pixels


def test_trusted_proxies_are_addresses_or_networks() -> None:
    networks = load({"NEREID_TRUSTED_PROXIES": "127.0.0.1, 10.1.0.0/16,,2001:db8::/32"}).trusted_networks

    assert [str(network) for network in networks] == ["127.0.0.1/32", "10.1.0.0/16", "2001:db8::/32"]
    assert load({}).trusted_networks == ()


def test_single_instance_listens_on_host_and_port_or_on_its_socket(tmp_path: Path) -> None:
    """None stands for host and port."""
    assert Settings().sockets == [None]
    assert Settings(socket=str(tmp_path / "api.sock")).sockets == [tmp_path / "api.sock"]


def test_several_instances_have_numbered_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their folder is resolved, because instances are told the path."""
    monkeypatch.chdir(tmp_path)

    found = Settings(instances=2, socket="sockets").sockets

    assert found == [tmp_path / "sockets" / "nereid-1.sock", tmp_path / "sockets" / "nereid-2.sock"]
    assert Settings(instances=1).sockets == [tmp_path / "run" / "nereid-1.sock"]


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:4603"),
        ("0.0.0.0", "http://127.0.0.1:4603"),  # noqa: S104 - nobody listens
        ("::", "http://[::1]:4603"),
        ("fd00::1", "http://[fd00::1]:4603"),
        ("gateway", "http://gateway:4603"),
    ],
)
def test_local_url_names_an_address_that_can_be_connected_to(host: str, url: str) -> None:
    """An address to listen on need not be one."""
    assert Settings(host=host).local_url == url


def test_table_has_a_row_for_each_setting() -> None:
    lines = render().splitlines()

    assert lines[:3] == [
        "| variable | default | meaning |",
        "|---|---|---|",
        "| `NEREID_HOST` | `127.0.0.1` | Address the API listens on. |",
    ]
    assert [line.split("`")[1] for line in lines[2:]] == [PREFIX + name.upper() for name in Settings.__struct_fields__]
    assert all(line.count(" | ") == 2 and line.endswith(". |") for line in lines[2:])
    assert "| `NEREID_PORT` | `4603` | Port the API listens on. |" in lines
    assert any(line.startswith("| `NEREID_TRACING` | `false` | ") for line in lines)
    assert any(line.startswith("| `NEREID_TRITON_ENDPOINTS` |  | gRPC endpoints of running Tritons") for line in lines)
