"""Models with configs that hurt, each in one way, and how to examine a set-up."""

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.doctor import report
from app.doctor.finding import Finding, Severity
from app.doctor.report import Report
from app.settings.schema import Settings
from app.triton.repository import DESCRIPTION
from tests.support import ROOT, free_port

POLICY = """default_queue_policy {
  timeout_action: REJECT default_timeout_microseconds: 600000000 allow_timeout_override: true max_queue_size: 64 }"""
GOOD_BATCHING = f"dynamic_batching {{ {POLICY} }}"
_WAIT_MS = 10
"""Long beside what sending a request takes."""
_CONFIG = """
name: "NAME"
backend: "python"
max_batch_size: 8
input { name: "image" data_type: TYPE_UINT8 dims: [ 32, 32, 3 ] }
output { name: "num_dets" data_type: TYPE_INT32 dims: [ 1 ] }
output { name: "det_boxes" data_type: TYPE_FP32 dims: [ 300, 4 ] }
output { name: "det_scores" data_type: TYPE_FP32 dims: [ 300 ] }
output { name: "det_classes" data_type: TYPE_INT32 dims: [ 300 ] }
instance_group [ { count: 1 kind: KIND_CPU } ]
BATCHING
parameters { key: "labels" value { string_value: "nothing" } }
parameters { key: "wait_milliseconds" value { string_value: "WAIT" } }
parameters { key: "wait_milliseconds_per_image" value { string_value: "0" } }
""".replace("WAIT", str(_WAIT_MS))


def _batching(text: str) -> str:
    return _CONFIG.replace("BATCHING", text)


_GOOD = _batching(GOOD_BATCHING)
CONFIGS = {
    "good": _GOOD,
    "no_policy": _batching("dynamic_batching { }"),
    "long_delay": _batching(f"dynamic_batching {{ max_queue_delay_microseconds: 200000 {POLICY} }}"),
    "one_by_one": _batching(""),
    "expired": _batching(GOOD_BATCHING.replace("default_timeout_microseconds: 600000000 ", "")),
    "nameless": _GOOD.replace('key: "labels"', 'key: "remarks"'),
    "floats": _GOOD.replace("TYPE_UINT8", "TYPE_FP32"),
    "two_inputs": _GOOD + 'input { name: "other" data_type: TYPE_UINT8 dims: [ 1 ] }',
    "too_large": _batching("dynamic_batching { preferred_batch_size: [ 16 ] }"),
    "single": _GOOD + 'optimization { execution_accelerators { gpu_execution_accelerator { name: "tensorrt" } } }',
    "broken": _GOOD,
}
"""By name. Triton loads all but the last two."""
LOADED = [name for name in CONFIGS if name not in {"too_large", "broken"}]


def write(repository: Path) -> None:
    for name, config in CONFIGS.items():
        version = repository / name / "1"
        version.mkdir(parents=True)
        (version.parent / "config.pbtxt").write_text(config.replace("NAME", name), encoding="utf-8")
        shutil.copy(ROOT / "bench" / "models" / "model.py", version)
    (repository / "single" / DESCRIPTION).touch()
    (repository / "broken" / "1" / "model.py").write_text("raise ValueError('its weights are missing')", encoding="utf-8")


class Examined(msgspec.Struct):
    code: int
    report: Report

    def __getitem__(self, code: str) -> Finding:
        (finding,) = self.all(code)
        return finding

    def all(self, code: str) -> list[Finding]:
        return [finding for finding in self.report.findings if finding.code == code]


def examine(settings: Settings, capsys: pytest.CaptureFixture[str], **options: bool) -> Examined:
    chosen: dict[str, Any] = {"is_strict": False, **options}
    code = report.run(settings, as_json=True, **chosen)
    out, err = capsys.readouterr()
    assert err == ""
    return Examined(code, msgspec.json.decode(out, type=Report))


def run_command(*command: str, **settings: str) -> tuple[int, dict[str, Finding]]:
    """Run a command line that ends in `doctor --json`; returns its exit code, and the findings by their codes."""
    environ = {**os.environ, "NEREID_TRITON_HOME": "/nowhere", "NEREID_PORT": str(free_port()), **settings}
    result = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, check=False)
    assert result.stderr == ""
    findings = msgspec.convert(json.loads(result.stdout)["findings"], list[Finding])
    return result.returncode, {finding.code: finding for finding in findings}


def assert_useful(finding: Finding, severity: Severity, *, says: list[str], fix: str) -> None:
    """Check a finding that demands something: what it says, and what it tells to do."""
    assert finding.severity is severity
    for text in says:
        assert text in finding.message
    assert "\n" not in finding.message
    assert finding.fix is not None
    assert fix in finding.fix
