"""Records before and after."""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from bench.report.compare import compare
from bench.report.contests import ContestantResult
from bench.report.records import Server
from bench.report.records import load_record, make_record
from tests.bench.support import make_contest, make_measurement, make_overload_runs, make_run, make_runs_record


def test_like_is_compared_with_like(saved: tuple[Path, Path]) -> None:
    text = compare(*map(load_record, saved))

    assert "nereid, full, 4 clients, yolo11n: 1 and 1 runs are too few to judge a change" in text
    assert re.search(r"^mean +59\.5 +29\.8 +0\.50 x \(0\.50\.\.0\.50\) *$", text, re.MULTILINE)
    assert "only in the first: nereid, full, 16 clients, yolo11n" in text
    assert "only in the second: other, full, 4 clients, yolo11n" in text


@pytest.mark.parametrize(
    ("before", "after", "throughput", "cpu"),
    [
        pytest.param((95, 100, 100, 105, 110), (97, 102, 102, 107, 112), "", "", id="within the noise"),
        pytest.param((95, 100, 100, 105, 110), (112, 120, 111, 130, 111), "better", "worse", id="above all rounds"),
        pytest.param((95, 100, 100, 105, 110), (94, 80, 90, 93, 93), "worse", "better", id="below all rounds"),
        pytest.param((95, 100, 105, 110), (120, 130, 140, 150), "", "", id="too few rounds"),
    ],
)
def test_changes_are_judged_by_the_rounds(before: Sequence[float], after: Sequence[float], throughput: str, cpu: str) -> None:
    records = []
    for rates in (before, after):
        rounds = [make_measurement(rate, cpu=rate / 10) for rate in rates]
        entry = ContestantResult(name="nereid", model="null", rounds=rounds, resident_mib=[100.0])
        records.append(make_record({}, contests=[make_contest(entries=[entry])]))
    text = compare(*records)

    assert re.search(rf"^requests/s .*\) +{throughput}$", text, re.MULTILINE)
    assert re.search(rf"^cpu gateway .*\) +{cpu}$", text, re.MULTILINE)
    assert re.search(r"^worker MiB +100 +100 +1\.00 x \(1\.00\.\.1\.00\) +$", text, re.MULTILINE)
    assert ("4 and 4 runs are too few" in text) == (len(before) == 4)


def test_another_machine_is_pointed_out() -> None:
    before, after = make_runs_record(make_run()), make_runs_record(make_run())
    after.machine = msgspec.structs.replace(after.machine, cores=before.machine.cores + 1)

    assert "NOT THE SAME MACHINE" in compare(before, after)


def test_contests_are_compared_by_contestant() -> None:
    record = make_record({}, contests=[make_contest()])
    text = compare(record, record)

    assert "nereid, versus: null, 32 clients, 32 clients, null" in text
    assert re.search(r"^requests/s +350 +350 +1\.00 x \(0\.69\.\.1\.44\) +$", text, re.MULTILINE)


def test_phases_of_overload_are_compared_whatever_their_rate() -> None:
    """It is a multiple of the peak, which is never measured twice alike."""
    before, after = (make_runs_record(*make_overload_runs("nereid")) for _ in range(2))
    after.runs[1].rate = 210.0

    text = compare(before, after)
    assert "nereid, overload, open_10, wait_20" in text
    assert "only in" not in text


def test_records_of_different_servers_are_named_as_such() -> None:
    """One may be of a server that the bench started."""
    before, after = make_record({}), make_record({}, server=Server("example.org", "192.0.2.2", is_here=False))

    assert "NOT THE SAME SERVER: of the bench against example.org (192.0.2.2), another machine" in compare(before, after)
    assert "NOT THE SAME SERVER" not in compare(after, after)
