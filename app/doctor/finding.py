"""Findings of checks."""

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    WARNING = "warning"
    """It works, but will cause problems under load or after a failure."""
    FAILURE = "failure"


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    code: str
    """Identifies the check; stable across versions."""
    severity: Severity
    message: str
    """One sentence, with the measured values."""
    fix: str | None = None
    """The fix: lines of a config, settings or a command; None if none is needed."""


def ok(code: str, message: str) -> Finding:
    """Report that a check passed."""
    return Finding(code, Severity.OK, message)


def warning(code: str, message: str, fix: str) -> Finding:
    """Report a potential problem."""
    return Finding(code, Severity.WARNING, message, fix)


def failure(code: str, message: str, fix: str) -> Finding:
    """Report that something does not work."""
    return Finding(code, Severity.FAILURE, message, fix)


def count(number: float, noun: str) -> str:
    """Format a number with its noun: 1 core, 0.5 cores."""
    return f"{number:g} {noun}{'' if number == 1 else 's'}"
