"""The report: what it contains, how it is printed, and the exit code."""

import json

import msgspec
import pytest

from app import __version__
from app.doctor import report
from app.doctor.finding import Severity
from app.settings.schema import Settings
from tests.doctor.setups import examine

ALWAYS = """
pillow image_formats jpeg_decoder opencv model_repository api_keys timeouts workers open_files memory triton
gateway
"""
WITH_A_MODEL = "triton_version shared_memory models model labels batching inference dev_shm"


@pytest.mark.system
def test_a_good_model_gives_no_advice(hurting: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    examined = examine(hurting, capsys)

    assert (examined.code, examined.report.failures) == (0, 0)
    assert {finding.code for finding in examined.report.findings} >= {*ALWAYS.split(), *WITH_A_MODEL.split()}
    for code in ({*WITH_A_MODEL.split()} - {"models"}) | {"triton", "queue_policy", "queue_delay", "input_type"}:
        assert examined[code].severity is Severity.OK, code
        assert examined[code].fix is None
    assert (examined.report.triton, examined.report.model) == (hurting.triton_address, "good")
    assert examined.report.version == __version__


def test_a_failure_is_exit_code_1(without_triton: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    code = report.run(without_triton, as_json=True, is_strict=False)
    document = json.loads(capsys.readouterr().out)
    severities = [finding["severity"] for finding in document["findings"]]

    assert (code, document["status"], document["failures"], severities.count("failure")) == (1, "failure", 1, 1)
    assert set(document) == {"version", "status", "triton", "model", "warnings", "failures", "findings"}
    assert {tuple(finding) for finding in document["findings"]} == {("code", "severity", "message", "fix")}


@pytest.mark.parametrize(("is_strict", "code"), [(False, 0), (True, 1)])
def test_a_warning_is_exit_code_1_if_it_is_to_be(
    small: Settings, capsys: pytest.CaptureFixture[str], code: int, *, is_strict: bool
) -> None:
    """Without `--strict`, scripts continue."""
    examined = examine(small, capsys, is_strict=is_strict)

    assert examined.code == code
    assert examined.report.status is Severity.WARNING
    assert examined["batching"].severity is Severity.WARNING
    assert examined.report.failures == 0


def test_text_is_one_line_per_finding_and_one_per_line_of_a_fix(small: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    settings = msgspec.structs.replace(small, model="unbatched")
    findings = examine(settings, capsys).report.findings
    code = report.run(settings, as_json=False, is_strict=False)
    lines = capsys.readouterr().out.splitlines()
    start = next(
        index for index, line in enumerate(lines) if line.startswith("WARN  queue_policy: unbatched has no max_queue_size")
    )

    assert code == 0
    assert sum(line[:6] in {"ok    ", "WARN  ", "FAIL  "} for line in lines) == len(findings)
    assert lines[start + 1].startswith("      fix: add to ")
    assert lines[start + 2].strip() == "dynamic_batching {"
    assert lines[start + 8].strip() == "max_queue_size: 256"
    assert lines[-1] == f"0 failures, {sum(line.startswith('WARN') for line in lines)} warnings"
