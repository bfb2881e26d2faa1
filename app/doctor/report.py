"""Run all checks and print the findings as text or JSON."""

import asyncio
from collections import Counter

import msgspec

from app import __version__
from app.doctor import consistency, database, gateway, limits, machine, tritons
from app.doctor.finding import Finding, Severity, count
from app.settings.schema import Settings

_LABELS = {Severity.OK: "ok  ", Severity.WARNING: "WARN", Severity.FAILURE: "FAIL"}
_INDENT = "\n           "


class Report(msgspec.Struct, frozen=True):
    """The document that `--json` prints."""

    version: str
    status: Severity
    """The highest severity of the findings."""
    triton: str
    """Addresses of the Tritons, separated by commas."""
    model: str
    warnings: int
    failures: int
    findings: list[Finding]


def run(settings: Settings, *, as_json: bool, is_strict: bool) -> int:
    """Examine everything, print a report, and return the exit code: 0, or 1 if something does not work."""
    report = _examine(settings)
    print(msgspec.json.format(msgspec.json.encode(report)).decode() if as_json else _to_text(report))
    return 1 if report.failures or (is_strict and report.warnings) else 0


def _examine(settings: Settings) -> Report:
    examined = asyncio.run(tritons.examine(settings))
    slot_bytes = None if examined.spec is None else examined.spec.image_bytes
    findings = [
        *machine.check(settings),
        *consistency.check(settings),
        *limits.check(settings, slot_bytes, maps_memory=examined.maps_memory),
        *examined.findings,
        gateway.check(settings),
        *asyncio.run(database.check(settings)),
    ]
    counts = Counter(finding.severity for finding in findings)
    return Report(
        __version__,
        next((severity for severity in (Severity.FAILURE, Severity.WARNING) if counts[severity]), Severity.OK),
        ",".join(settings.triton_addresses),
        settings.model,
        counts[Severity.WARNING],
        counts[Severity.FAILURE],
        findings,
    )


def _to_text(report: Report) -> str:
    lines = []
    for finding in report.findings:
        lines.append(f"{_LABELS[finding.severity]}  {finding.code}: {finding.message}")
        if finding.fix is not None:
            lines.append(f"      fix: {finding.fix.replace(chr(10), _INDENT)}")
    lines.append(f"{count(report.failures, 'failure')}, {count(report.warnings, 'warning')}")
    return "\n".join(lines)
