"""The page, on made-up numbers."""

from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest

from bench.report.contest_text import contest_text
from bench.report.page import page
from bench.report.records import Record, load_record, make_record
from bench.report.scaling import scaling_text
from tests.bench.support import make_contest, make_outcome, make_overload_runs, make_run, make_runs_record, make_scaling

DEAD = make_run(outcome=make_outcome([], error=10), triton=None, triton_note="gone", cpu_ms={})


class Elements(HTMLParser):
    """What a page consists of: its elements, what a browser would fetch for it, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.names: list[str] = []
        self.open: list[str] = []
        self.links: list[str] = []
        self.text: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.links += [value or "" for name, value in attributes if name in {"src", "href", "srcset", "data", "action"}]
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attributes)
        self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text.append(data)


def draw(*records: tuple[str, Record]) -> Elements:
    """Draw a page, which must be well formed and need neither scripts nor files."""
    text = page(records)
    elements = Elements(text)
    assert not elements.open
    assert not elements.links
    assert "script" not in elements.names
    assert "url(" not in text
    assert "@import" not in text
    return elements


def test_runs_of_several_files_are_drawn_together(saved: tuple[Path, Path]) -> None:
    """Each is named by what distinguishes it: properties that all share are left out."""
    text = draw(*((path.stem, load_record(path)) for path in saved)).text

    for title in ("requests/s", "p99, ms", "Latency, ms", "CPU per request by process, ms", "Mean time of each stage, ms"):
        assert title in text
    assert {"nereid, before, 4 clients", "nereid, before, 16 clients", "nereid, after, 4 clients", "other, after, 4 clients"} <= {
        *text
    }


def test_a_contest_is_told_as_on_the_terminal_and_drawn() -> None:
    contest = make_contest(left_out={"broken": "it is <broken>"})
    elements = draw(("versus", make_record({}, contests=[contest])))

    assert contest_text(contest) in elements.text
    assert "Requests per second" in elements.text
    assert "p99, ms" not in elements.text  # over one number of clients


def test_a_scaling_is_told_as_on_the_terminal_and_drawn_over_clients() -> None:
    scaling = make_scaling()
    elements = draw(("scale", make_record({}, scalings=[scaling])))

    assert scaling_text(scaling) in elements.text
    assert {"1 Triton", "2 Tritons", "p99, ms"} <= {*elements.text}


def test_overload_is_drawn_over_the_offered_load() -> None:
    """Crowds set the pace themselves, so they are not in those charts; each server's memory is drawn over time."""
    runs = make_overload_runs("nereid", "nereid@before")
    crowd = make_overload_runs("nereid")[1]
    crowd.rate = None
    text = draw(("x", make_runs_record(*runs, crowd))).text

    assert {"goodput/s", "requests/s offered", "worker 1"} <= {*text}
    assert "goodput/s" not in draw(("x", make_runs_record(crowd))).text


@pytest.mark.parametrize(
    "runs", [[], [DEAD], [make_run(contestant="<script>alert(1)</script>"), make_run(), make_run()]], ids=["no", "dead", "script"]
)
def test_any_record_can_be_drawn(runs: Sequence[object]) -> None:
    """One without runs, one whose server did not answer, and names that are HTML or alike."""
    draw(("a&b", make_record({}, runs, [make_contest(entries=[])])))  # type: ignore[arg-type]
