"""Contests as text."""

from bench.report.contest_text import contest_text
from bench.report.contests import Comparison, ContestantResult
from tests.bench.support import make_contest, make_measurement


def test_a_contest_has_a_line_for_each_contestant_and_each_comparison() -> None:
    pairs = [("nereid", "reference")]
    text = contest_text(make_contest(left_out={"broken": "no port"}, comparisons=[Comparison("reference", pairs)]))

    (line,) = (line for line in text.splitlines() if line.startswith("nereid "))
    assert line.split()[1:7] == ["350", "7.00", "5.00", "9.01", "9.01", "9.01"]  # requests/s, mean, p50, p90, p95, p99
    assert line.endswith("null")
    assert "against reference, median of the rounds' ratios (min..max):" in text
    assert "throughput 3.50 x (3.50..3.50), gateway's CPU 1.00 x (1.00..1.00), p50 1.00 x (1.00..1.00)" in text
    assert "broken is left out: no port" in text


def test_wrong_answers_and_a_busy_client_are_pointed_out() -> None:
    """Otherwise the numbers would be taken at face value."""
    measured = make_measurement(100.0)
    measured.outcome.driver_cpu = 0.9
    measured.outcome.statuses = {"200": 10, "wrong": 190}
    entry = ContestantResult(name="nereid", model="null", rounds=[measured])
    text = contest_text(make_contest(entries=[entry], clients=1))

    assert "answers were wrong or missing: nereid" in text
    assert "the client used more than 80% of a core with nereid" in text
    assert "neither decoding nor Triton" in text
