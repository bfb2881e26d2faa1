"""Records before and after."""

import re
from pathlib import Path

import msgspec

from bench.report.compare import compare
from bench.report.records import load_record, make_record
from tests.bench.support import make_contest, make_outcome, make_overload_runs, make_run, make_runs_record


def test_like_is_compared_with_like(saved: tuple[Path, Path]) -> None:
    """The run that both have is compared, with the direction of each change; the others are named."""
    text = compare(*map(load_record, saved))

    assert re.search(r"^mean +59\.5 +29\.8 +-50\.\d % +better$", text, re.MULTILINE)
    assert re.search(r"^requests/s +50\.0 +50\.0 +=", text, re.MULTILINE)
    assert "only in the first: nereid, full, 16 clients, yolo11n" in text
    assert "only in the second: other, full, 4 clients, yolo11n" in text


def test_changes_are_judged() -> None:
    """More throughput is better, more latency is not; errors where there were none are worse; another machine is pointed out."""
    before = make_runs_record(make_run())
    after = make_runs_record(make_run(2, outcome=make_outcome([20.0] * 150, s200=150, s503=50)))
    after.machine = msgspec.structs.replace(after.machine, cores=before.machine.cores + 1)
    text = compare(before, after)

    assert re.search(r"^requests/s +50\.0 +75\.0 +\+50\.0 % +better$", text, re.MULTILINE)
    assert re.search(r"^errors % +0\.00 +25\.0 +\+25\.0 +worse$", text, re.MULTILINE)
    assert "NOT THE SAME MACHINE" in text


def test_contests_are_compared_by_contestant() -> None:
    record = make_record({}, contests=[make_contest()])
    text = compare(record, record)

    assert "nereid, versus: null, 32 clients, 32 clients, null" in text
    assert re.search(r"^requests/s +350 +350 +=", text, re.MULTILINE)


def test_phases_of_overload_are_compared_whatever_their_rate() -> None:
    """It is a multiple of the peak, which is never measured twice alike."""
    before, after = (make_runs_record(*make_overload_runs("nereid")) for _ in range(2))
    after.runs[1].rate = 210.0

    text = compare(before, after)
    assert "nereid, overload, open_10, wait_20" in text
    assert "only in" not in text
