"""How to examine a set-up, and what a finding must say."""

import json
import os
import subprocess

import msgspec
import pytest

from app.doctor import report
from app.doctor.finding import Finding, Severity
from app.doctor.report import Report
from app.settings.schema import Settings
from tests.support import ROOT, free_port

OK, WARNING, FAILURE = Severity.OK, Severity.WARNING, Severity.FAILURE


class Examined(msgspec.Struct):
    code: int
    report: Report

    def __getitem__(self, code: str) -> Finding:
        (finding,) = self.all(code)
        return finding

    def all(self, code: str) -> list[Finding]:
        return [finding for finding in self.report.findings if finding.code == code]


def examine(settings: Settings, capsys: pytest.CaptureFixture[str], *, is_strict: bool = False) -> Examined:
    code = report.run(settings, as_json=True, is_strict=is_strict)
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


def assert_finding(finding: Finding, severity: Severity, *says: str) -> None:
    """Check a finding: it is one line, with a fix that tells what to do unless all is well, and both together say this."""
    assert finding.severity is severity, finding
    assert (finding.fix is None) == (severity is OK), finding
    assert "\n" not in finding.message
    for text in says:
        assert text in f"{finding.message}; {finding.fix}"
