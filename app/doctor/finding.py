"""What a check has found."""

from enum import StrEnum

import msgspec


class Severity(StrEnum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """It works, but it will hurt under load, or when something fails."""
    FAILURE = "failure"
    """It does not work."""


class Finding(msgspec.Struct, frozen=True):
    """The result of one check."""

    code: str
    """Which check it was; the same in all versions."""
    severity: Severity
    message: str
    """One sentence, with the figures that were seen."""
    fix: str | None = None
    """What to do: lines of a config, settings or a command; None if nothing is to be done."""


def ok(code: str, message: str) -> Finding:
    """Report what is as it should be."""
    return Finding(code, Severity.OK, message)


def warning(code: str, message: str, fix: str) -> Finding:
    """Report what will hurt."""
    return Finding(code, Severity.WARNING, message, fix)


def failure(code: str, message: str, fix: str) -> Finding:
    """Report what does not work."""
    return Finding(code, Severity.FAILURE, message, fix)


def count(number: float, noun: str) -> str:
    """Write a number and what it is of, for a message: 1 core, 0.5 cores."""
    return f"{number:g} {noun}{'' if number == 1 else 's'}"
