"""The part of a page about overload."""

from bench.report.page import page
from tests.bench.report.elements import Elements
from tests.bench.support import make_outcome, make_overload_runs, make_run, make_runs_record


def test_servers_are_drawn_beside_each_other() -> None:
    """Goodput and p99 have one curve per server, memory one per worker; the runs are in no other section."""
    text = page([("x", make_runs_record(*make_overload_runs("nereid", "nereid@before")))])

    assert not Elements(text).open
    assert "<h2>Overload: wait_20</h2>" in text
    assert "<h2>Numbers</h2>" not in text
    for title in ("Goodput over offered load", "p99 over offered load", "Memory over time: open_10"):
        assert f"<h3>{title}</h3>" in text
    assert text.count('<polyline points="') == 2 + 2 + 4


def test_servers_of_several_files_are_told_apart() -> None:
    record = make_runs_record(*make_overload_runs("nereid"))
    text = page([("before", record), ("after", record)])

    assert '<td title="">nereid, before</td><td>open_10</td>' in text
    assert '<td title="">nereid, after</td><td>open_10</td>' in text


def test_other_runs_of_the_same_record_have_their_own_sections() -> None:
    text = page([("x", make_runs_record(make_run(), *make_overload_runs("nereid")))])

    assert "<h2>Numbers</h2>" in text
    assert "<h2>Overload: wait_20</h2>" in text


def test_a_server_that_answered_nothing_can_be_drawn() -> None:
    peak, burst = make_overload_runs("nereid")
    burst.outcome = make_outcome([], error=10)
    text = page([("x", make_runs_record(burst))])

    assert not Elements(text).open
    assert "Goodput over offered load" in text
    assert "p99 over offered load" not in text
    assert "nan" not in text
    assert peak.overload


def test_crowds_have_no_curve() -> None:
    """Their clients set the pace, so there is no load that was offered."""
    _, burst = make_overload_runs("nereid")
    burst.rate = None
    text = page([("x", make_runs_record(burst))])

    assert "over offered load" not in text
    assert "Memory over time" in text
