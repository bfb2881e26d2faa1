"""The page, on made-up numbers."""

import re
from pathlib import Path

from bench.report.page import page
from bench.report.records import load_record, make_record
from tests.bench.report.elements import Elements
from tests.bench.support import make_contest, make_run, make_runs_record


def test_the_page_is_complete_and_needs_nothing_else(saved: tuple[Path, Path]) -> None:
    """It is well formed, contains every plot, no scripts and nothing that a browser would fetch."""
    text = page([(path.stem, load_record(path)) for path in saved])
    elements = Elements(text)

    assert not elements.open
    assert not elements.links
    assert "script" not in elements.names
    assert "url(" not in text
    assert "@import" not in text
    assert "prefers-color-scheme: dark" in text
    for title in ("Numbers", "Latency", "Throughput over clients", "Stages", "CPU per request", "Batch sizes"):
        assert f"<h2>{title}</h2>" in text
    assert text.count('<polyline points="') >= 4
    assert "nan" not in re.sub(r"<title>.*?</title>", "", text)


def test_the_page_names_the_model_that_answered() -> None:
    """The table of runs names it, and so does the table of a contest."""
    record = make_record({}, [make_run(model="yolox_nano")], [make_contest()])
    text = page([("x", record)])

    assert text.count("<td>yolox_nano</td>") == 1
    assert text.count("<td>null</td>") == 2


def test_names_cannot_break_the_page() -> None:
    text = page([("a&b", make_runs_record(make_run(contestant="<script>alert(1)</script>"), make_run(contestant="b")))])

    assert "<script" not in text
    assert not Elements(text).open
