"""The part of a page about contests."""

from bench.report.contests import Comparison
from bench.report.page import page
from bench.report.records import make_record
from tests.bench.report.elements import Elements
from tests.bench.support import make_contest, make_outcome


def test_the_page_draws_contests() -> None:
    """A record of `versus` gives throughput with its ratio, cost, stages and batches of each contestant."""
    text = page([("versus", make_record({}, contests=[make_contest(left_out={"broken": "it is <broken>"})]))])

    assert not Elements(text).open
    assert "350/s, 3.50 x" in text
    assert "broken was left out: it is &lt;broken&gt;" in text
    assert text.count("<circle") == 6
    assert text.count("<polyline") == 2
    assert "reference: mean 2.50" in text
    assert "<h2>Numbers</h2>" not in text


def test_the_page_shows_the_comparisons_of_a_contest() -> None:
    comparison = Comparison("reference", [("nereid", "reference")])
    text = page([("versus", make_record({}, contests=[make_contest(comparisons=[comparison])]))])

    assert "<tr><td>nereid</td><td>reference</td><td>3.50 x (3.50..3.50)</td>" in text


def test_a_contest_without_answers_can_be_drawn() -> None:
    """The same is true of a contestant, and of a contest without any."""
    contest = make_contest()
    for one in contest.entries[0].rounds:
        one.outcome = make_outcome([], error=10)
        one.triton, one.cpu_ms, one.figures = None, {}, {}
    text = page([("x", make_record({}, contests=[contest, make_contest(entries=[])]))])

    assert not Elements(text).open
    assert text.count("<section>") == 1
