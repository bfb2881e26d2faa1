"""The page, on made-up numbers."""

import re
from html import unescape
from pathlib import Path

import pytest

from bench.report.contest_text import contest_text
from bench.report.records import Server
from bench.report.page import page
from bench.report.records import Record, load_record, make_record
from tests.bench.support import make_contest, make_outcome, make_overload_runs, make_run, make_runs_record

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


CONTEST = make_contest(left_out={"broken": "it is <broken>"})
STRANGE = make_run(contestant="<script>alert(1)</script>")


@pytest.mark.parametrize(
    ("record", "parts"),
    [
        (make_record({}, contests=[CONTEST]), [contest_text(CONTEST), "Requests per second"]),
        (make_runs_record(*make_overload_runs("nereid", "nereid@before")), ["goodput/s", "requests/s offered", "worker 1"]),
        (make_record({}, contests=[make_contest(entries=[])]), []),
        (make_record({}, server=Server("example.org", "192.0.2.2", is_here=False)), ["example.org (192.0.2.2), another machine"]),
        (make_runs_record(DEAD), []),
        (make_runs_record(STRANGE, make_run(), make_run()), []),
    ],
    ids=["contest", "overload", "nothing", "server", "dead", "script"],
)
def test_any_record_can_be_drawn(record: Record, parts: list[str]) -> None:
    """What the terminal shows is there beside the charts; a server may not have answered, and names may be HTML or alike."""
    text = draw(("a&b", record))

    assert [part for part in parts if part not in text] == []
