"""What is said of settings that are valid one by one."""

from pathlib import Path
from typing import Any

import pytest

from app.api.caller import keys
from app.doctor import consistency
from app.doctor.finding import Finding, Severity
from app.settings.schema import Settings
from tests.doctor.setups import assert_useful


def check(**settings: Any) -> dict[str, Finding]:  # noqa: ANN401
    return {finding.code: finding for finding in consistency.check(Settings(**settings))}


def test_the_defaults_are_consistent() -> None:
    found = check()

    assert set(found) == {"api_keys", "timeouts"}
    assert {finding.severity for finding in found.values()} == {Severity.OK}


@pytest.mark.parametrize(
    ("settings", "code", "says", "fix"),
    [
        *(({"host": host}, "api_keys", [f"{host}:4603"], "NEREID_API_KEYS_FILE") for host in ("0.0.0.0", "::")),  # noqa: S104 - nobody listens
        (
            {"timeout_seconds": 30, "max_timeout_seconds": 20},
            "timeouts",
            ["30 s", "20 s"],
            "NEREID_MAX_TIMEOUT_SECONDS=30",
        ),
    ],
)
def test_settings_that_hurt(settings: dict[str, Any], code: str, says: list[str], fix: str) -> None:
    assert_useful(check(**settings)[code], Severity.WARNING, says=says, fix=fix)


@pytest.mark.parametrize(
    ("settings", "code"),
    [
        ({"host": "0.0.0.0", "socket": "run/a.sock"}, "api_keys"),  # noqa: S104 - nobody listens
        ({"host": "0.0.0.0", "instances": 2}, "api_keys"),  # noqa: S104
    ],
)
def test_settings_that_do_not_hurt(settings: dict[str, Any], code: str) -> None:
    assert check(**settings)[code].severity is Severity.OK


def test_an_api_with_keys_beyond_loopback(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    file.write_text(keys.create("camera")[1], encoding="utf-8")
    found = check(host="0.0.0.0", api_keys_file=str(file))  # noqa: S104 - nobody listens

    assert found["api_keys"].severity is Severity.OK
    assert found["api_keys"].message.endswith(": camera")
    (file := tmp_path / "invalid.toml").write_text("[camera]\n", encoding="utf-8")
    assert_useful(
        check(api_keys_file=str(file))["api_keys"], Severity.FAILURE, says=["API_KEYS_FILE: ", "camera"], fix="nereid key NAME"
    )


@pytest.mark.parametrize("host", ["no-such-host.invalid", "a..b"])
def test_a_host_that_is_no_address(host: str) -> None:
    """Who could reach it is not known; another check says that nobody can."""
    assert "api_keys" not in check(host=host)


@pytest.mark.parametrize(
    ("setting", "value", "absent", "extra"),
    [
        ("cache", "memory", "blake3", "cache"),
        ("cache", "redis://host/0", "redis", "redis"),
        ("search", "on", "asyncpg", "search"),
        ("search", "alone", "pgvector", "search"),
        ("tracing", True, "opentelemetry.sdk", "otel"),
    ],
)
def test_feature_that_is_on_needs_its_extra(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: object, absent: str, extra: str
) -> None:
    assert setting not in check(**{setting: value})
    monkeypatch.setattr("app.host.extras._is_installed", lambda module: module != absent)

    says, fix = [f"NEREID_{setting.upper()} needs what is not installed: {absent}"], f"pip install 'nereid-gateway[{extra}]'"
    assert_useful(check(**{setting: value})[setting], Severity.FAILURE, says=says, fix=fix)
    assert setting not in check()


def test_a_control_key_that_cannot_be_read(tmp_path: Path) -> None:
    found = check(triton_endpoints="127.0.0.1:8001", triton_control_key_file=str(tmp_path / "nowhere"))

    assert_useful(found["control_key"], Severity.FAILURE, says=["nowhere"], fix="NEREID_TRITON_CONTROL_KEY_FILE")


@pytest.mark.parametrize(
    ("code", "setting", "file"),
    [
        ("api_keys", "api_keys_file", ""),
        ("tls_files", "triton_tls_folder", "/ca.crt"),
        ("cache_key", "cache_key_file", ""),
    ],
)
def test_a_file_that_does_not_exist(tmp_path: Path, code: str, setting: str, file: str) -> None:
    path = str(tmp_path / "nowhere")
    found = check(triton_endpoints="127.0.0.1:8001", **{setting: path})

    assert found[code].severity is Severity.FAILURE
    assert found[code].message == f"NEREID_{setting.upper()}: {path}{file}: No such file or directory"


def test_a_routes_file_that_is_not_valid(tmp_path: Path) -> None:
    path = tmp_path / "routes.toml"
    path.write_text("[detector]\n", encoding="utf-8")
    found = check(routes_file=str(path))

    assert_useful(found["routes"], Severity.FAILURE, says=[f"NEREID_ROUTES_FILE: {path} is not valid", "`to`"], fix="[detector]")


def test_a_folder_that_cannot_be_indexed(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for folder in ("missing", "file"):
        found = check(search_folders=f"{tmp_path},{tmp_path / folder}")["search_folders"]
        assert_useful(found, Severity.FAILURE, says=[str(tmp_path / folder), "not a folder"], fix="readable")
    assert "search_folders" not in check(search_folders=str(tmp_path))


def test_how_long_a_stop_takes_is_told() -> None:
    """A service manager that kills sooner loses requests."""
    message = check(drain_delay_seconds=5.0, body_seconds=10.0, max_timeout_seconds=20.0)["timeouts"].message

    assert "40 s" in message
