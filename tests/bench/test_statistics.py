"""Numbers of the bench: what is counted of the answers, medians, percentiles, ratios and their spread."""

import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path

import msgspec
import pytest

from bench.load.outcome import Outcome, encode_latencies, merge_histograms
from bench.load.tally import Tally
from bench.report.compare import compare
from bench.report.measurements import Measurement, Overload, Run, TritonUse, WorkerMemory
from bench.report.page import page
from bench.report.records import RecordError, Server, load_record, make_record, save_record
from bench.report.text import overview, sheet

CAT = b'{"detections":[{"class_name":"cat"},{"class_name":"person"}],"model":{"name":"yolo11n"}}'
ROBOFLOW_CAT = b'{"predictions":[{"class":"cat","class_id":15}]}'
DOG = b'{"detections":[{"class_name":"dog"}]}'


def make_outcome(milliseconds: Sequence[float], **statuses: int) -> Outcome:
    """Make up an outcome of two seconds with these latencies; statuses are given as s200=1, error=2."""
    counted = {name.removeprefix("s"): count for name, count in statuses.items()} or {"200": len(milliseconds)}
    return Outcome(
        seconds=2.0,
        requests=sum(counted.values()),
        statuses=counted,
        latency=encode_latencies(value / 1e3 for value in milliseconds),
        stages={"decode": 2.0, "infer": 5.0, "total": 9.0},
        driver_cpu=0.25,
    )


def make_run(scale: float = 1.0, rounds: int = 0, **changes: object) -> Run:
    """Make up a run with latencies of `scale` times 10 to 109 ms, and so many rounds like it."""
    outcome = make_outcome([scale * value for value in range(10, 110)])
    use = TritonUse(inferences=100, executions=40, queue_ms=1.5, compute_ms=30.0, batches={"1": 10, "3": 30})
    cpu = {"gateway": 3.0, "triton": 0.5, "stubs": 40.0, "client": 0.25}
    made = Run(contestant="nereid", mode="full", model="yolo11n", clients=4, outcome=outcome, triton=use, cpu_ms=cpu)
    held = [Measurement(outcome=outcome, triton=use, cpu_ms=cpu)] * rounds
    return msgspec.structs.replace(made, figures={}, rounds=held, **changes)


def tallied(*answers: tuple[int, float, str, bytes, bytes], expected: frozenset[str] = frozenset()) -> Outcome:
    """Count answers: number, start of the latency, status, body and Server-Timing."""
    tally = Tally([expected], 1, 60)
    tally.start()
    for one in answers:
        tally.answered(*one)
    return tally.outcome(0.0)


@pytest.mark.parametrize(
    ("body", "status", "model"),
    [(CAT, "200", "yolo11n"), (ROBOFLOW_CAT, "200", ""), (DOG, "wrong", ""), (b"no JSON", "wrong", "")],
)
def test_answer_is_correct_if_the_expected_classes_are_in_it(body: bytes, status: str, model: str) -> None:
    outcome = tallied((0, 0.0, "200", body, b""), expected=frozenset({"cat"}))

    assert (outcome.statuses, outcome.model) == ({status: 1}, model)
    assert outcome.correct == outcome.histogram.total_count == (status == "200")


def test_percentiles_are_those_of_the_latencies_and_rejections_have_their_own() -> None:
    outcome = make_outcome(range(1, 101))
    rejected = tallied(*((1, -1.0, status, b'{"code":"busy"}', b"") for status in ("429", "503", "504", "200")))

    assert [outcome.percentile(percent) for percent in (50, 99)] == pytest.approx([50, 99], rel=1e-3)
    assert (outcome.mean, outcome.max) == pytest.approx((50.5, 100), rel=1e-3)
    assert merge_histograms([rejected.rejections]).total_count == 2
    assert (rejected.rejection_percentile(50) > 1000, rejected.histogram.total_count) == (True, 1)
    assert rejected.codes == {status: ["busy"] for status in ("429", "503", "504")}


def rounds(*rates: int) -> list[Measurement]:
    return [Measurement(outcome=make_outcome([5.0, 9.0], s200=2 * rate), cpu_ms={"gateway": 100 / rate}) for rate in rates]


def test_rounds_are_shown_by_their_median_and_compared_one_by_one() -> None:
    """Noise in a whole round cancels out."""
    base = Run.of_rounds(rounds(100, 50, 90), {}, contestant="reference", mode="versus", model="null", clients=32)
    run = Run.of_rounds(rounds(400, 100, 300), {"worker MiB": 120.0}, contestant="nereid", mode="versus", model="null", clients=32)
    run.bases = ["reference"]
    lines = overview([base, run]).splitlines()
    ratio = "  nereid / reference: throughput 3.33 x (2.00..4.00), gateway's CPU 0.30 x (0.25..0.50), p50 1.00 x (1.00..1.00), p99 "

    assert run.outcome.rate == run.median("requests/s") == 300
    assert f"{ratio}1.00 x (1.00..1.00)" in lines
    assert [line.split()[:2] for line in lines[2:4]] == [["reference", "90.0"], ["nereid", "300"]]


@pytest.mark.parametrize(("scale", "count", "judged"), [(2.0, 5, ["worse"]), (0.5, 5, ["better"]), (1.0, 5, []), (2.0, 2, [])])
def test_change_is_judged_only_by_enough_rounds_that_do_not_overlap(scale: float, count: int, judged: list[str]) -> None:
    before, after = make_record({}, [make_run(rounds=count)]), make_record({}, [make_run(scale, rounds=count)])
    (p50,) = [line for line in compare(before, after).splitlines() if line.startswith("p50 ")]

    assert p50.split()[3:] == [f"{scale:.2f}", "x", f"({scale:.2f}..{scale:.2f})", *judged]


def test_record_survives_its_file(tmp_path: Path) -> None:
    overload = Overload(phase="open_10", offered=200, peak=20, memory=[WorkerMemory([0.0], [100.0])])
    record = make_record({"model": "null"}, [make_run(rounds=2), make_run(overload=overload)], Server("a", "::1", is_here=True))
    save_record(tmp_path / "x.json", record)

    assert load_record(tmp_path / "x.json") == record
    (tmp_path / "x.json").write_bytes(b"{}")
    with pytest.raises(RecordError, match=re.escape(str(tmp_path / "x.json"))):
        load_record(tmp_path / "x.json")


def test_page_has_the_text_of_the_terminal_and_charts_without_scripts() -> None:
    """A server may not have answered, and names may be HTML or alike."""
    dead = make_run(outcome=make_outcome([], error=10), triton=None, triton_note="gone", cpu_ms={})
    overload = Overload(phase="open_10", offered=200, peak=20, memory=[WorkerMemory([0.0, 0.2], [100.0, 120.0])])
    runs = [make_run(contestant="<script>alert(1)</script>"), make_run(), make_run(), dead, make_run(overload=overload)]
    drawn = page([("a&b", make_record({}, runs)), ("empty", make_record({}, []))])

    assert not re.search(r"<script|\b(src|href|srcset|data|action)=|url\(|@import", drawn)
    assert overview(runs) in unescape(drawn)
    assert drawn.count("<polyline") == 5
    assert "mean batch 2.50 (1: 10, 3: 30), queue 1.50 ms" in sheet(make_run())
