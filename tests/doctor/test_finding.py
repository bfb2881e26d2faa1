"""Findings and their words."""

import pytest

from app.doctor.finding import Severity, count, failure, ok, warning


def test_a_finding_has_a_fix_unless_it_is_ok() -> None:
    assert (ok("a", "b").severity, ok("a", "b").fix) == (Severity.OK, None)
    assert (warning("a", "b", "c").severity, warning("a", "b", "c").fix) == (Severity.WARNING, "c")
    assert (failure("a", "b", "c").severity, failure("a", "b", "c").fix) == (Severity.FAILURE, "c")


@pytest.mark.parametrize(("number", "text"), [(0, "0 cores"), (0.5, "0.5 cores"), (1, "1 core"), (1.0, "1 core"), (2, "2 cores")])
def test_one_is_singular(number: float, text: str) -> None:
    assert count(number, "core") == text
