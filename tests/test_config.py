"""Settings from the environment."""

from pathlib import Path

import msgspec
import pytest

from app.config import PREFIX, Settings, SettingsError, load, table
from tests.support import ROOT

README = ROOT / "README.md"


def test_empty_environment_gives_the_defaults() -> None:
    """Every setting has a default."""
    settings = load({})

    assert settings == Settings()
    assert (settings.host, settings.port, settings.workers, settings.model) == ("127.0.0.1", 4603, 0, "yolo11n")
    assert (settings.triton_http_port, settings.triton_grpc_port, settings.triton_metrics_port) == (4600, 4601, 4602)


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("HOST", "0.0.0.0", "0.0.0.0"),  # noqa: S104
        ("PORT", "65535", 65535),
        ("API_KEYS_FILE", "/etc/nereid/keys.toml", "/etc/nereid/keys.toml"),
        ("WORKERS", "1", 1),
        ("DECODE_THREADS", "256", 256),
        ("MODEL", "null", "null"),
        ("TIMEOUT_SECONDS", "0.5", 0.5),
        ("TIMEOUT_SECONDS", "600", 600.0),
        ("MAX_TIMEOUT_SECONDS", "600", 600.0),
        ("BODY_PAUSE_SECONDS", "0.5", 0.5),
        ("BODY_SECONDS", "3600", 3600.0),
        ("MAX_REQUESTS", "0", 0),
        ("MAX_UPLOADS", "65536", 65536),
        ("MEMORY_MB", "1048576", 1048576),
        ("MAX_FILE_SIZE_MB", "1024", 1024.0),
        ("MAX_MEGAPIXELS", "178", 178.0),
        ("LOG_LEVEL", "debug", "debug"),
        ("LOG_FORMAT", "json", "json"),
        ("TRITON_HOME", "/srv/triton", "/srv/triton"),
    ],
)
def test_variable_sets_its_setting(name: str, text: str, value: object) -> None:
    """The text becomes the setting of that name, and no other setting changes."""
    assert load({PREFIX + name: text}) == msgspec.structs.replace(Settings(), **{name.lower(): value})


def test_variables_of_others_are_ignored() -> None:
    """Only variables with our prefix are read."""
    assert load({"PORT": "1", "HOME": "/", "XNEREID_PORT": "2", "nereid_port": "3"}) == Settings()


@pytest.mark.parametrize("name", ["NEREID_PROT", "NEREID_", "NEREID_TRITON_URL", "NEREID__PORT"])
def test_unknown_variable_is_named(name: str) -> None:
    """A misspelt setting is rejected instead of ignored."""
    with pytest.raises(SettingsError, match=f"^{name} is not a setting; the settings are listed in the README$"):
        load({"NEREID_PORT": "4603", name: "1"})


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("PORT", "0"),
        ("PORT", "65536"),
        ("PORT", "http"),
        ("PORT", ""),
        ("TRITON_GRPC_PORT", "-1"),
        ("WORKERS", "-1"),
        ("WORKERS", "1.5"),
        ("WORKERS", "257"),
        ("DECODE_THREADS", "0"),
        ("TIMEOUT_SECONDS", "0"),
        ("TIMEOUT_SECONDS", "601"),
        ("TIMEOUT_SECONDS", "nan"),
        ("TIMEOUT_SECONDS", "10s"),
        ("MAX_TIMEOUT_SECONDS", "0"),
        ("BODY_PAUSE_SECONDS", "0"),
        ("BODY_SECONDS", "3601"),
        ("MAX_REQUESTS", "-1"),
        ("MAX_UPLOADS", "0"),
        ("MEMORY_MB", "1048577"),
        ("MAX_FILE_SIZE_MB", "0"),
        ("MAX_FILE_SIZE_MB", "inf"),
        ("MAX_MEGAPIXELS", "179"),
        ("LOG_LEVEL", "INFO"),
        ("LOG_FORMAT", "text"),
    ],
)
def test_invalid_value_is_named(name: str, text: str) -> None:
    """A value of the wrong type or out of range is rejected, and the message begins with the variable."""
    with pytest.raises(SettingsError, match=f"^{PREFIX}{name}: [A-Z]"):
        load({PREFIX + name: text})


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument the process's own environment is read."""
    monkeypatch.setenv("NEREID_PORT", "8080")

    assert load().port == 8080


def test_triton_is_the_embedded_one_unless_another_is_named() -> None:
    """The address is the embedded Triton's, on whatever port, or the given one."""
    assert load({}).triton_url == "127.0.0.1:4601"
    assert load({"NEREID_TRITON_GRPC_PORT": "9001"}).triton_url == "127.0.0.1:9001"
    assert load({"NEREID_TRITON_URLS": "triton:8001"}).triton_url == "triton:8001"


def test_two_tritons_are_rejected() -> None:
    """More than one address is not supported, and the message says so."""
    with pytest.raises(SettingsError, match=r"^NEREID_TRITON_URLS: only one address is supported$"):
        load({"NEREID_TRITON_URLS": "a:8001,b:8001"})


def test_limits_are_whole_bytes_and_pixels() -> None:
    """MiB and megapixels are converted to bytes and pixels."""
    settings = load({"NEREID_MAX_FILE_SIZE_MB": "1.5", "NEREID_MAX_MEGAPIXELS": "0.5"})

    assert (settings.max_body_bytes, settings.max_pixels) == (1572864, 500000)


@pytest.mark.parametrize(("most", "unscalable", "pixels"), [("100", "30", 30_000_000), ("20", "25", 20_000_000)])
def test_no_image_has_more_pixels_than_the_general_limit(most: str, unscalable: str, pixels: int) -> None:
    """The limit of images that cannot be decoded at a reduced size applies if it is the smaller one."""
    settings = load({"NEREID_MAX_MEGAPIXELS": most, "NEREID_MAX_MEGAPIXELS_UNSCALABLE": unscalable})

    assert settings.max_pixels_unscalable == pixels


def test_registry_is_in_the_model_repository() -> None:
    """`models.toml` is found beside the models."""
    assert load({"NEREID_MODEL_REPOSITORY": "/srv/models"}).registry_path == Path("/srv/models/models.toml")


def test_settings_do_not_change() -> None:
    """They are read once and cannot be assigned to."""
    with pytest.raises(AttributeError):
        Settings().port = 1  # type: ignore[misc]


def test_table_has_a_row_for_each_setting() -> None:
    """Every variable is listed with its default and its meaning."""
    lines = table().splitlines()

    assert lines[:3] == [
        "| variable | default | meaning |",
        "|---|---|---|",
        "| `NEREID_HOST` | `127.0.0.1` | Address the API listens on. |",
    ]
    assert [line.split("`")[1] for line in lines[2:]] == [PREFIX + name.upper() for name in Settings.__struct_fields__]
    assert all(line.count(" | ") == 2 and line.endswith(". |") for line in lines[2:])
    assert "| `NEREID_TRITON_GRPC_PORT` | `4601` | gRPC port of the embedded Triton, on 127.0.0.1. |" in lines
    assert any(line.startswith("| `NEREID_TRITON_URLS` |  | gRPC endpoint of a running Triton, `host:port`") for line in lines)


def test_readme_has_the_table() -> None:
    """The README lists the settings as they are in the code."""
    assert table() in README.read_text(encoding="utf-8")
