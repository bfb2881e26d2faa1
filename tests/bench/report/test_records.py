"""Records and their files."""

from pathlib import Path

import msgspec
import pytest

from bench.report.records import Comparison, ContestantResult, Overload, WorkerMemory, load_record, make_record, save_record
from tests.bench.support import make_contest, make_measurement, make_overload_runs, make_run, make_runs_record


def test_a_record_survives_its_file(saved: tuple[Path, Path]) -> None:
    """Histograms are included; the figures are there for programs that cannot read them."""
    read = load_record(saved[0])

    assert [one.key for one in read.runs] == [
        ("nereid", "full", "yolo11n", "4 clients"),
        ("nereid", "full", "yolo11n", "16 clients"),
    ]
    assert read.runs[0].outcome.percentile(50) == pytest.approx(59, rel=0.01)
    assert read.machine.cores >= 1
    figures = msgspec.json.decode(saved[0].read_bytes())["runs"][0]["figures"]
    assert figures["requests/s"] == 50
    assert figures["p50"] <= figures["p90"] <= figures["p95"] <= figures["p99"] <= figures["max"]
    assert figures["mean batch"] == 2.5


def test_a_contest_survives_its_file(tmp_path: Path) -> None:
    """Its rounds, comparisons and those left out are read as they were written."""
    contest = make_contest(left_out={"broken": "why"}, comparisons=[Comparison("reference", [("nereid", "reference")])])
    save_record(tmp_path / "versus.json", make_record({"model": "null"}, contests=[contest]))
    read = load_record(tmp_path / "versus.json")

    assert read.contests == [contest]
    assert read.runs == []
    assert read.settings == {"model": "null"}


def test_a_contestant_is_represented_by_its_median_round() -> None:
    """Contests can thus be compared like runs; the memory of a worker is one of the figures."""
    contest = make_contest()
    contest.entries[1].resident_mib = [100.0, 120.0]
    record = make_record({}, [make_run()], [contest])
    _, reference, nereid = record.all_runs

    assert nereid.key == ("nereid", "versus: null, 32 clients", "null", "32 clients")
    assert nereid.outcome.rate == 350
    assert nereid.figures["worker MiB"] == 120
    assert reference.outcome.rate == 100


def test_ratios_are_of_the_same_round() -> None:
    """Noise that hits a whole round does not change them."""
    entries = [
        ContestantResult(name=name, model="null", note="", rounds=[make_measurement(rate) for rate in rates])
        for name, rates in (("reference", [100.0, 50.0]), ("nereid_shm", [400.0, 200.0]))
    ]

    assert make_contest(entries=entries).ratios("nereid_shm", "reference", "requests/s") == [4, 4]


def test_a_round_without_the_figure_has_no_ratio() -> None:
    """Nothing is divided by zero."""
    entries = [
        ContestantResult(name="base", model="null", note="", rounds=[make_measurement(0.0), make_measurement(10.0)]),
        ContestantResult(name="one", model="null", note="", rounds=[make_measurement(5.0), make_measurement(5.0)]),
    ]

    assert make_contest(entries=entries).ratios("one", "base", "requests/s") == [0.5]


@pytest.mark.parametrize(
    "content",
    [None, b"{}", b"no JSON", b"\xff", msgspec.json.encode(msgspec.to_builtins(make_runs_record(make_run())) | {"contests": 3})],
    ids=["missing", "other", "broken", "no text", "other contests"],
)
def test_a_file_that_is_not_a_record_is_one_line(content: bytes | None, tmp_path: Path) -> None:
    """The message names the file."""
    path = tmp_path / "x.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ValueError, match=r"x\.json") as caught:
        load_record(path)
    assert "\n" not in str(caught.value)


def test_a_run_under_overload_survives_its_file(tmp_path: Path) -> None:
    """Its figures include goodput, rejections, recovery and the memory of the largest worker."""
    runs = make_overload_runs("nereid")
    save_record(tmp_path / "overload.json", make_record({}, runs))
    read = load_record(tmp_path / "overload.json")

    assert read.runs == runs
    figures = read.runs[1].figures
    assert figures["goodput"] == 19
    assert figures["rejected p50"] == pytest.approx(2, rel=0.01)
    assert figures["recovery"] == 1.2
    assert (figures["resident MiB before"], figures["resident MiB peak"], figures["resident MiB after"]) == (100, 120, 120)
    assert figures["proportional MiB after"] == 80


def test_what_was_not_measured_under_overload_has_no_figure() -> None:
    """A server that does not answer afterwards has not recovered; a worker may have ended before its memory was read."""
    gone = WorkerMemory(seconds=[], resident_mib=[], proportional_mib=[])
    figures = Overload(phase="at_once", offered=10, peak=10, before_ms=5.0, memory=[gone]).figures()

    assert figures == {"offered/s": 10, "peak/s": 10}
