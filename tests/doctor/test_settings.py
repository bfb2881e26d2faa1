"""What is said of settings that are valid one by one, and of the files that they name."""

from pathlib import Path
from typing import Any

import pytest

from app.api.caller import keys
from app.doctor import consistency, machine
from app.doctor.finding import Finding, Severity
from app.settings.schema import Settings
from tests.doctor.setups import FAILURE, OK, WARNING, assert_finding

EVERYWHERE, ELSEWHERE = {"host": "0.0.0.0"}, {"triton_endpoints": "127.0.0.1:8001"}  # noqa: S104 - nobody listens


def check(**settings: Any) -> dict[str, Finding]:  # noqa: ANN401
    return {finding.code: finding for finding in consistency.check(Settings(**settings))}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files of keys and routes, some of which are not valid."""
    (tmp_path / "keys.toml").write_text(keys.create("camera")[1], encoding="utf-8")
    (tmp_path / "invalid.toml").write_text("[camera]\n", encoding="utf-8")
    return tmp_path


@pytest.mark.parametrize(
    ("settings", "code", "severity", "says"),
    [
        ({}, "api_keys", OK, ["which only this machine can reach"]),
        (EVERYWHERE, "api_keys", WARNING, ["0.0.0.0:4603", "NEREID_API_KEYS_FILE"]),
        ({"host": "::"}, "api_keys", WARNING, [":::4603"]),
        ({**EVERYWHERE, "socket": "run/a.sock"}, "api_keys", OK, ["unix sockets"]),
        ({**EVERYWHERE, "instances": 2}, "api_keys", OK, ["unix sockets"]),
        ({**EVERYWHERE, "api_keys_file": "{}/keys.toml"}, "api_keys", OK, [": camera"]),
        ({"api_keys_file": "{}/invalid.toml"}, "api_keys", FAILURE, ["API_KEYS_FILE: ", "camera", "nereid key NAME"]),
        ({"api_keys_file": "{}/nowhere"}, "api_keys", FAILURE, ["NEREID_API_KEYS_FILE: {}/nowhere: No such file"]),
        # Of a host that is no address, another check says that nobody can reach it.
        ({"host": "a..b"}, "api_keys", None, []),
        ({"timeout_seconds": 30, "max_timeout_seconds": 20}, "timeouts", WARNING, ["30 s", "20 s", "MAX_TIMEOUT_SECONDS=30"]),
        # A service manager that kills sooner loses requests.
        ({"drain_delay_seconds": 5.0, "body_seconds": 10.0, "max_timeout_seconds": 20.0}, "timeouts", OK, ["stop 40 s"]),
        ({"triton_tls_folder": "{}/nowhere", **ELSEWHERE}, "tls_files", FAILURE, ["{}/nowhere/ca.crt: No such", "ca.crt"]),
        ({"triton_control_key_file": "{}/nowhere", **ELSEWHERE}, "control_key", FAILURE, ["{}/nowhere", "CONTROL_KEY_FILE"]),
        ({"cache_key_file": "{}/nowhere"}, "cache_key", FAILURE, ["NEREID_CACHE_KEY_FILE: {}/nowhere: No such file"]),
        ({"routes_file": "{}/invalid.toml"}, "routes", FAILURE, ["NEREID_ROUTES_FILE: {}/invalid.toml", "`to`", "[detector]"]),
        ({"search_folders": "{},{}/missing"}, "search_folders", FAILURE, ["{}/missing is not a folder", "readable"]),
        ({"search_folders": "{}/keys.toml"}, "search_folders", FAILURE, ["{}/keys.toml is not a folder"]),
        ({"search_folders": "{}"}, "search_folders", None, []),
    ],
)
def test_settings_and_their_files(
    folder: Path, settings: dict[str, Any], code: str, severity: Severity | None, says: list[str]
) -> None:
    formatted = {name: value.replace("{}", str(folder)) if isinstance(value, str) else value for name, value in settings.items()}
    found = check(**formatted)
    if severity is None:
        assert code not in found
    else:
        assert_finding(found[code], severity, *(text.replace("{}", str(folder)) for text in says))


@pytest.mark.parametrize(
    ("setting", "value", "absent", "extra"),
    [
        ("cache", "memory", "blake3", "cache"),
        ("cache", "redis://host/0", "redis", "redis"),
        ("search", "on", "asyncpg", "search"),
        ("tracing", True, "opentelemetry.sdk", "otel"),
    ],
)
def test_feature_that_is_on_needs_its_extra(
    monkeypatch: pytest.MonkeyPatch, setting: str, value: object, absent: str, extra: str
) -> None:
    assert setting not in check(**{setting: value})
    monkeypatch.setattr("app.host.extras._is_installed", lambda module: module != absent)

    says = (f"NEREID_{setting.upper()} needs what is not installed: {absent}", f"pip install 'nereid-gateway[{extra}]'")
    assert_finding(check(**{setting: value})[setting], FAILURE, *says)
    assert setting not in check()


@pytest.mark.parametrize(("extra", "module", "model"), [("ocr", "pyclipper", "ocr_detection"), ("masks", "pycocotools", "shapes")])
def test_extra_that_no_setting_needs_is_missed_if_there_is_a_model_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, extra: str, module: str, model: str
) -> None:
    settings = Settings(model_repository=str(tmp_path), task_models="segmentation=shapes")
    monkeypatch.setattr("app.host.extras._is_installed", lambda name: name != module)
    for severity in (OK, WARNING):
        (found,) = (finding for finding in machine.check(settings) if finding.code == extra)
        assert_finding(found, severity, module, f"pip install 'nereid-gateway[{extra}]'")
        (tmp_path / model).mkdir(exist_ok=True)
