"""Numbers of the bench: what is counted of the answers, medians, percentiles, ratios and their spread."""

import asyncio
import re
from collections import Counter
from html import unescape
from pathlib import Path
from time import perf_counter

import grpc
import numpy as np
import psutil
import pytest

from app.triton.client import TritonClient
from bench.experiments import fair, text
from bench.experiments.server_load import MAX_CLIENTS, MAX_TRIES, find_best
from bench.harness.counters import Counters, CountersError, read_counters
from bench.harness.meters import Meters
from bench.load.outcome import MAX_MICROSECONDS, Outcome, encode_latencies, merge_histograms
from bench.load.tally import Tally
from bench.load.text_pictures import TextPicture
from bench.report.compare import compare
from bench.report.measurements import Measurement, Overload, Run, TritonUse, WorkerMemory
from bench.report.page import page
from bench.report.records import RecordError, Server, load_record, make_record, save_record
from bench.report.text import overview, sheet, spread
from tests.bench.support import CAT, DOG, make_outcome, make_run
from tests.fakes.triton import FakeTriton


def tallied(*answers: tuple[int, float, str, bytes, bytes], seconds: float = 60, expected: frozenset[str] | None = None) -> Outcome:
    """Count answers: number, start of the latency, status, body and Server-Timing."""
    tally = Tally([frozenset() if expected is None else expected], 1, seconds)
    tally.start()
    for one in answers:
        tally.answered(*one)
    return tally.outcome(0.0)


@pytest.mark.parametrize(
    ("body", "status", "model"),
    [
        (CAT, "200", "yolo11n"),
        (DOG, "wrong", ""),
        (b'{"classifications":[{"class_name":"cat"}],"model":{"name":3}}', "200", ""),
        (b'{"detections":[{"class_name":"cat"}],"model":[1]}', "200", ""),
        (b"{}", "wrong", ""),
        (b"no JSON", "wrong", ""),
        (b'"\xff"', "wrong", ""),
    ],
)
def test_answer_is_correct_if_the_expected_classes_are_in_it(body: bytes, status: str, model: str) -> None:
    """Other servers may put anything into `model`, and are correct all the same."""
    outcome = tallied((0, 0.0, "200", body, b""), expected=frozenset({"cat"}))

    assert (outcome.statuses, outcome.model) == ({status: 1}, model)
    assert outcome.correct == outcome.histogram.total_count == (status == "200")


def test_every_seventeenth_of_the_later_answers_is_checked() -> None:
    assert tallied(*((place, 0.0, "200", b"", b"") for place in range(35))).statuses == {"200": 32, "wrong": 3}  # 0, 17, 34


def test_stages_and_the_time_outside_of_them_are_read_from_server_timing() -> None:
    timing = b'decode;dur=0.2, infer;dur=0.1, post;dur=0.3;desc="x", cache'
    outcome = tallied((0, perf_counter() - 1, "200", b'{"detections":[]}', timing))

    assert outcome.stages == {"decode": 0.2, "infer": 0.1, "post": 0.3, "cache": 0.0}
    assert outcome.overhead_p50 == pytest.approx(outcome.mean - 0.3, rel=1e-3)


def test_rejections_have_latencies_of_their_own() -> None:
    outcome = tallied(*((1, -1.0, status, b'{"code":"busy"}', b"") for status in ("429", "503", "504", "200")))

    assert merge_histograms([outcome.rejections]).total_count == 2
    assert outcome.rejection_percentile(50) > 1000
    assert outcome.histogram.total_count == 1
    assert outcome.codes == {status: ["busy"] for status in ("429", "503", "504")}


def test_delay_of_a_schedule_is_that_of_all_but_one_in_a_hundred() -> None:
    tally = Tally([frozenset()], patience=1)
    assert tally.outcome(0.0).delay_p99 == 0
    for milliseconds in range(100):
        tally.due(milliseconds / 1e3)

    assert tally.outcome(0.0).delay_p99 == pytest.approx(99)


def test_percentiles_are_those_of_the_latencies() -> None:
    outcome, empty = make_outcome(range(1, 101)), make_outcome([], error=3)
    total = merge_histograms([encode_latencies([0.0, 0.001]), encode_latencies([3600.0])])

    assert [outcome.percentile(percent) for percent in (50, 99)] == pytest.approx([50, 99], rel=1e-3)
    assert (outcome.mean, outcome.max) == pytest.approx((50.5, 100), rel=1e-3)
    assert (empty.rate, empty.mean, empty.percentile(99), empty.failed) == (0, 0, 0, 1)
    assert total.total_count == 3
    assert total.get_max_value() == pytest.approx(MAX_MICROSECONDS, rel=1e-3)


@pytest.mark.parametrize(
    ("values", "described"),
    [([2.0], "2.00 x (2.00..2.00)"), ([3, 1, 2], "2.00 x (1.00..3.00)"), ([1, 4], "2.50 x (1.00..4.00)"), ([], "-")],
)
def test_spread_is_the_median_and_the_extremes(values: list[float], described: str) -> None:
    assert spread(values) == described


def rounds(*rates: int) -> list[Measurement]:
    return [Measurement(outcome=make_outcome([5.0, 9.0], s200=2 * rate), cpu_ms={"gateway": 100 / rate}) for rate in rates]


def test_rounds_are_shown_by_their_median_and_compared_one_by_one() -> None:
    """Noise in a whole round cancels out."""
    base = Run.of_rounds(rounds(100, 50, 90), {}, contestant="reference", mode="versus", model="null", clients=32)
    run = Run.of_rounds(rounds(400, 100, 300), {"worker MiB": 120.0}, contestant="nereid", mode="versus", model="null", clients=32)
    run.bases = ["reference"]
    lines = overview([base, run]).splitlines()

    assert run.outcome.rate == run.median("requests/s") == 300
    assert run.ratios(base, "requests/s") == pytest.approx([4, 2, 300 / 90])
    assert base.median("worker MiB") is None
    assert (
        "  nereid / reference: throughput 3.33 x (2.00..4.00), gateway's CPU 0.30 x (0.25..0.50), p50 1.00 x (1.00..1.00)" in lines
    )
    assert [line.split()[:2] for line in lines[2:4]] == [["reference", "90.0"], ["nereid", "300"]]


def test_figures_of_overload_are_those_of_the_largest_worker() -> None:
    """A worker may have ended before its memory was read; a server that does not answer afterwards has not recovered."""
    memory = [WorkerMemory([0.0, 0.2], [100.0, 120.0]), WorkerMemory([], [])]
    figures = Overload(phase="open_10", offered=200, peak=20, before_ms=50.0, after_ms=60.0, memory=memory).figures()
    expected = {"resident MiB before": 100, "resident MiB peak": 120, "resident MiB after": 120, "recovery": 1.2}

    assert figures == {"offered/s": 200, "peak/s": 20, **expected}
    assert Overload(phase="x", offered=10, peak=10, before_ms=5.0).figures() == {"offered/s": 10, "peak/s": 10}


@pytest.mark.parametrize(
    ("scale", "count", "judged"),
    [(2.0, 5, "worse"), (0.5, 5, "better"), (1.0, 5, ""), (2.0, 2, "")],
    ids=["slower", "faster", "equal", "too few rounds"],
)
def test_change_is_judged_only_by_enough_rounds_that_do_not_overlap(scale: float, count: int, judged: str) -> None:
    before, after = make_record({}, [make_run(rounds=count)]), make_record({}, [make_run(scale, rounds=count)])
    lines = compare(before, after).splitlines()
    (p50,) = [line for line in lines if line.startswith("p50 ")]

    assert p50.split()[3:] == [f"{scale:.2f}", "x", f"({scale:.2f}..{scale:.2f})", *([judged] if judged else [])]
    assert any("too few to judge" in line for line in lines) == (count == 2)


def test_record_survives_its_file(tmp_path: Path) -> None:
    overload = Overload(phase="open_10", offered=200, peak=20, memory=[WorkerMemory([0.0], [100.0])])
    record = make_record({"model": "null"}, [make_run(rounds=2), make_run(overload=overload)], Server("a", "::1", is_here=True))
    save_record(tmp_path / "x.json", record)

    assert load_record(tmp_path / "x.json") == record
    (tmp_path / "x.json").write_bytes(b"{}")
    for path in (tmp_path / "x.json", tmp_path / "missing"):
        with pytest.raises(RecordError, match=re.escape(str(path))):
            load_record(path)


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


def test_only_what_happened_meanwhile_counts_in_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of several Tritons are added up; a process that appeared meanwhile counts in full."""
    gateway = psutil.Process()
    used, found, images = {gateway.pid: 10.0, 1: 5.0}, {"gateway": [gateway], "triton": []}, {"one": 5, "other": 0}

    def counters(triton: str, _model: str) -> Counters:
        done = images[triton]
        return Counters(2 * done, done, done, done * 4_000_000, done, done * 1_000_000, Counter({"2": done}))

    monkeypatch.setattr("bench.harness.meters.cpu_seconds", lambda process: used[process.pid])
    monkeypatch.setattr("bench.harness.meters.read_counters", counters)
    meters = Meters(lambda: found, list(images), "m")
    used[gateway.pid], found["gateway"], images["one"], images["other"] = 12.0, [gateway, psutil.Process(1)], 7, 3
    measured = meters.read(make_outcome([1.0] * 100))

    assert measured.triton == TritonUse(inferences=10, executions=5, queue_ms=1.0, compute_ms=4.0, batches={"2": 5})
    assert measured.triton.mean_batch == 2
    assert measured.cpu_ms == pytest.approx({"gateway": 70.0, "client": 5.0})


async def test_versions_of_a_model_are_added_up_and_a_refusal_is_one_line(fake_triton: tuple[FakeTriton, TritonClient]) -> None:
    fake, _ = fake_triton
    for _ in range(2):
        stats = fake.statistics.model_stats.add(name="m", inference_count=3)
        stats.batch_stats.add(batch_size=2).compute_infer.count = 1

    assert await asyncio.to_thread(read_counters, fake.url, "m") == Counters(6, 0, 0, 0, 0, 0, Counter({"2": 2}))
    fake.query_refusal = grpc.StatusCode.NOT_FOUND, "unknown model\nsomewhere"
    with pytest.raises(CountersError, match=f"^Triton at {fake.url}: NOT_FOUND unknown model$"):
        await asyncio.to_thread(read_counters, fake.url, "m")


def test_search_for_the_best_number_of_clients_has_no_more_runs_than_its_plan() -> None:
    def runs(best: int) -> int:
        tried = []

        def holds(clients: int) -> bool:
            tried.append(clients)
            return True

        found = find_best(holds, lambda clients: min(clients / best, best / clients), MAX_CLIENTS)
        assert found is not None
        assert 0.5 < found / best < 2
        return len(tried)

    assert max(map(runs, range(1, MAX_CLIENTS + 1, 5))) <= MAX_TRIES
    assert find_best(lambda _: False, lambda _: 0.0, MAX_CLIENTS) is None


@pytest.mark.parametrize(
    ("served", "times", "holds"),
    [(49, [60.0, 240.0], "yes"), (48, [60.0, 240.0], "NO"), (49, [61.0, 240.0], "NO"), (49, [60.0, 243.0], "NO")],
)
def test_row_of_fair_holds_if_b_is_served_nearly_as_alone(served: int, times: list[float], holds: str) -> None:
    alone, beside = make_outcome([10.0, 20.0]), make_outcome(times, s200=served, s429=50 - served)
    line = fair.describe([fair.Row("detect", alone, beside, Counter({"200": 30, "429": 5}), 2.0)]).splitlines()[2]

    assert line.split()[:3] == ["detect", "15.0", f"{served}/50"]
    assert line.split()[-1] == holds


@pytest.mark.parametrize(
    ("expected", "found", "errors"),
    [("kitten", "sitting", 3), ("", "ab", 2), ("ab", "", 2), ("same", "same", 0), ("图书馆", "图馆", 1)],
)
def test_errors_are_characters_to_insert_delete_or_replace(expected: str, found: str, errors: int) -> None:
    assert text.count_errors(expected, found) == errors


def line(words: str, left: int = 0, score: float = 1.0) -> text.ReadLine:
    return text.ReadLine(np.array([[left, 0], [left + 100, 0], [left + 100, 20], [left, 20]], np.float32), words, score)


def test_lines_and_boxes_are_compared_by_kind_of_picture_and_in_total() -> None:
    """Lines with a low score count as not read, but their boxes count."""
    pictures = [TextPicture("plain", b"", ["one two"]), TextPicture("page", b"", ["three", "four"])]
    expected = [[line("one two")], [line("three"), line("four", 200)]]
    found = [[line("one tw0")], [line("three", 3), line("four", 210, score=0.4), line("5", 500)]]
    rows = text.compare(pictures, expected, found)

    assert list(rows) == ["plain", "page", "all"]
    assert rows["plain"][:4] == (1, 7, 1, 0)
    assert tuple(rows["page"]) == (2, 10, 4, 0, pytest.approx([97 / 103, 90 / 110]), 3)
    assert (rows["all"].lines, rows["all"].errors, len(rows["all"].ious)) == (3, 5, 3)
