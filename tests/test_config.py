"""Settings from the environment."""

from pathlib import Path

import msgspec
import pytest

from app.config import PREFIX, Settings, SettingsError, load
from app.settings_table import render
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
        ("SOCKET", "/run/nereid/api.sock", "/run/nereid/api.sock"),
        ("SOCKET_MODE", "600", "600"),
        ("INSTANCES", "64", 64),
        ("SOCKET_FOLDER", "/run/nereid", "/run/nereid"),
        ("API_KEYS_FILE", "/etc/nereid/keys.toml", "/etc/nereid/keys.toml"),
        ("WORKERS", "1", 1),
        ("WORKER_MAX_AGE_SECONDS", "86400", 86400),
        ("WORKER_MAX_MEMORY_MB", "2048", 2048),
        ("DRAIN_DELAY_SECONDS", "0", 0.0),
        ("DRAIN_DELAY_SECONDS", "600", 600.0),
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
        ("SLOW_REQUEST_MS", "0", 0.0),
        ("SLOW_REQUEST_MS", "250.5", 250.5),
        ("TRACING", "true", True),
        ("TRITON_HOME", "/srv/triton", "/srv/triton"),
        ("TRITON_TLS", "false", False),
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
        ("SOCKET", "/" + "x" * 100),
        ("SOCKET_MODE", "0660"),
        ("SOCKET_MODE", "668"),
        ("SOCKET_MODE", "rw-rw----"),
        ("INSTANCES", "-1"),
        ("INSTANCES", "65"),
        ("SOCKET_FOLDER", "/" + "x" * 80),
        ("TRITON_GRPC_PORT", "-1"),
        ("TRITON_TLS", "on"),
        ("WORKERS", "-1"),
        ("WORKERS", "1.5"),
        ("WORKERS", "257"),
        ("WORKER_MAX_AGE_SECONDS", "-1"),
        ("WORKER_MAX_MEMORY_MB", "-1"),
        ("DRAIN_DELAY_SECONDS", "-1"),
        ("DRAIN_DELAY_SECONDS", "601"),
        ("DECODE_THREADS", "0"),
        ("TIMEOUT_SECONDS", "0"),
        ("TIMEOUT_SECONDS", "601"),
        ("TIMEOUT_SECONDS", "nan"),
        ("SLOW_REQUEST_MS", "-1"),
        ("TRACING", "on"),
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


@pytest.mark.parametrize(
    ("name", "text", "choices"),
    [
        ("TRANSPORT", "tcp", "auto, shm, inline"),
        ("LOG_LEVEL", "INFO", "debug, info, warning, error"),
        ("LOG_FORMAT", "xml", "auto, json, console"),
        ("TRITON_TLS", "on", "true, false"),
    ],
)
def test_values_to_choose_from_are_named(name: str, text: str, choices: str) -> None:
    """If there are only few, the message lists them."""
    with pytest.raises(SettingsError) as caught:
        load({PREFIX + name: text})
    assert str(caught.value) == f"{PREFIX}{name}: Expected one of {choices}; got '{text}'"


def test_environment_of_the_process_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an argument the process's own environment is read."""
    monkeypatch.setenv("NEREID_PORT", "8080")

    assert load().port == 8080


def test_triton_is_the_embedded_one_unless_another_is_named() -> None:
    """The address is the embedded Triton's, on whatever port, or the given one."""
    assert load({}).triton_url == "127.0.0.1:4601"
    assert load({"NEREID_TRITON_GRPC_PORT": "9001"}).triton_url == "127.0.0.1:9001"
    assert load({"NEREID_TRITON_URLS": "triton:8001"}).triton_url == "triton:8001"


def test_control_key_is_that_of_the_triton_in_use() -> None:
    """The embedded Triton has one for each port; another one has one only if the settings name it."""
    embedded = load({"NEREID_TRITON_HOME": "/srv/triton", "NEREID_TRITON_GRPC_PORT": "9001"})
    other = {"NEREID_TRITON_URLS": "triton:8001"}

    assert embedded.control_key_path == Path("/srv/triton/control-9001.key")
    assert load(other).control_key_path is None
    assert load({**other, "NEREID_TRITON_CONTROL_KEY_FILE": "/etc/key"}).control_key_path == Path("/etc/key")


@pytest.mark.parametrize(
    ("workers", "instances", "cores", "count"),
    [(0, 0, 8, 8), (0, 1, 8, 8), (0, 3, 8, 2), (0, 64, 8, 1), (5, 0, 8, 5), (5, 3, 8, 5)],
)
def test_workers_are_one_per_core_unless_they_are_counted(
    monkeypatch: pytest.MonkeyPatch, workers: int, instances: int, cores: int, count: int
) -> None:
    """Several instances share the cores; a number of workers is that of each instance."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(cores)))

    assert Settings(workers=workers, instances=instances).worker_count == count


@pytest.mark.parametrize(
    ("body", "usual", "most", "seconds"),
    [(30.0, 5.0, 20.0, 55), (30.0, 5.0, 0.5, 40), (1.0, 0.2, 1.1, 8), (0.5, 600.0, 600.0, 606)],
)
def test_requests_have_the_time_to_end_that_any_of_them_may_take(body: float, usual: float, most: float, seconds: int) -> None:
    """To receive the body, the longer one of the deadlines, and some seconds more for the rest."""
    settings = Settings(body_seconds=body, timeout_seconds=usual, max_timeout_seconds=most)

    assert settings.drain_seconds == seconds


REMOTE = {"NEREID_TRITON_URLS": "triton:8001"}
TLS = {**REMOTE, "NEREID_TRITON_TLS": "true"}
OWN = {"NEREID_TRITON_CERT_FILE": "own.pem", "NEREID_TRITON_KEY_FILE": "own.key"}


@pytest.mark.parametrize(
    ("environ", "files"),
    [
        ({}, None),
        (REMOTE, None),
        (TLS, ("", "", "")),
        ({**TLS, "NEREID_TRITON_CA_FILE": "ca.pem"}, ("ca.pem", "", "")),
        ({**TLS, **OWN}, ("", "own.pem", "own.key")),
    ],
)
def test_files_for_tls_may_be_left_out(environ: dict[str, str], files: tuple[str, str, str] | None) -> None:
    """There are none without TLS; with it each of them may be empty."""
    assert load(environ).triton_tls_files == files


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
    lines = render().splitlines()

    assert lines[:3] == [
        "| variable | default | meaning |",
        "|---|---|---|",
        "| `NEREID_HOST` | `127.0.0.1` | Address the API listens on. |",
    ]
    assert [line.split("`")[1] for line in lines[2:]] == [PREFIX + name.upper() for name in Settings.__struct_fields__]
    assert all(line.count(" | ") == 2 and line.endswith(". |") for line in lines[2:])
    assert "| `NEREID_TRITON_GRPC_PORT` | `4601` | gRPC port of the embedded Triton, on 127.0.0.1. |" in lines
    assert any(line.startswith("| `NEREID_TRITON_TLS` | `false` | ") for line in lines)
    assert any(line.startswith("| `NEREID_TRITON_URLS` |  | gRPC endpoint of a running Triton, `host:port`") for line in lines)


def test_readme_has_the_table() -> None:
    """The README lists the settings as they are in the code."""
    assert render() in README.read_text(encoding="utf-8")
