"""The page, on made-up numbers."""

import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path

import pytest

from bench.report.contest_text import contest_text
from bench.report.page import page
from bench.report.records import Record, load_record, make_record
from bench.report.scaling import scaling_text
from tests.bench.support import make_contest, make_outcome, make_overload_runs, make_run, make_runs_record, make_scaling

DEAD = make_run(outcome=make_outcome([], error=10), triton=None, triton_note="gone", cpu_ms={})


def draw(*records: tuple[str, Record]) -> str:
    """Draw a page, which needs neither scripts nor files; return it with what is escaped as text."""
    text = page(records)
    assert not re.search(r"<script|\b(src|href|srcset|data|action)=|url\(|@import", text)
    return unescape(text)


def test_runs_of_several_files_are_drawn_together(saved: tuple[Path, Path]) -> None:
    """Each is named by what distinguishes it: properties that all share are left out."""
    text = draw(*((path.stem, load_record(path)) for path in saved))

    for title in ("requests/s", "p99, ms", "Latency, ms", "CPU per request by process, ms", "Mean time of each stage, ms"):
        assert title in text
    for name in ("nereid, before, 4 clients", "nereid, before, 16 clients", "nereid, after, 4 clients", "other, after, 4 clients"):
        assert name in text


def test_a_contest_is_told_as_on_the_terminal_and_drawn() -> None:
    contest = make_contest(left_out={"broken": "it is <broken>"})
    text = draw(("versus", make_record({}, contests=[contest])))

    assert contest_text(contest) in text
    assert "Requests per second" in text
    assert "p99, ms" not in text  # over one number of clients


def test_a_scaling_is_told_as_on_the_terminal_and_drawn_over_clients() -> None:
    scaling = make_scaling()
    text = draw(("scale", make_record({}, scalings=[scaling])))

    assert scaling_text(scaling) in text
    assert all(part in text for part in ("1 Triton", "2 Tritons", "p99, ms"))


def test_overload_is_drawn_over_the_offered_load() -> None:
    """Crowds set the pace themselves, so they are not in those charts; each server's memory is drawn over time."""
    runs = make_overload_runs("nereid", "nereid@before")
    crowd = make_overload_runs("nereid")[1]
    crowd.rate = None
    text = draw(("x", make_runs_record(*runs, crowd)))

    assert all(part in text for part in ("goodput/s", "requests/s offered", "worker 1"))
    assert ">goodput/s<" not in draw(("x", make_runs_record(crowd)))


@pytest.mark.parametrize(
    "runs", [[], [DEAD], [make_run(contestant="<script>alert(1)</script>"), make_run(), make_run()]], ids=["no", "dead", "script"]
)
def test_any_record_can_be_drawn(runs: Sequence[object]) -> None:
    """One without runs, one whose server did not answer, and names that are HTML or alike."""
    draw(("a&b", make_record({}, runs, [make_contest(entries=[])])))  # type: ignore[arg-type]
