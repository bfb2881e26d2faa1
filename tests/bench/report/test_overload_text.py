"""Overload as a table."""

from bench.report.overload_text import overload_text
from tests.bench.support import make_overload_runs


def test_every_phase_has_a_row_per_server() -> None:
    """Each row has the responses by status; what was not measured is a dash."""
    text = overload_text(make_overload_runs("nereid", "nereid@before"))
    head, _, *rows = text.splitlines()

    assert "goodput/s" in head
    assert [row.split()[:2] for row in rows[:4]] == [
        ["peak", "nereid"],
        ["open_10", "nereid"],
        ["peak", "nereid@before"],
        ["open_10", "nereid@before"],
    ]
    assert "200: 40, 429: 350, error: 2" in rows[1]
    assert " - " in rows[0]
