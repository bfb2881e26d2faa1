"""Records and their files."""

from pathlib import Path

import msgspec
import pytest

from bench.report.contests import Comparison
from bench.report.measurements import Overload, WorkerMemory
from bench.report.records import load_record, make_record, save_record
from tests.bench.support import make_contest, make_overload_runs


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


def test_all_kinds_of_measurements_survive_their_file(tmp_path: Path) -> None:
    contest = make_contest(left_out={"broken": "why"}, comparisons=[Comparison("reference", [("nereid", "reference")])])
    record = make_record({"model": "null"}, make_overload_runs("nereid"), [contest])
    save_record(tmp_path / "all.json", record)

    assert load_record(tmp_path / "all.json") == record


def test_figures_of_a_run_under_overload() -> None:
    """They include goodput, rejections, recovery and the memory of the largest worker."""
    _, run = make_overload_runs("nereid")
    figures = run.figures

    assert figures["goodput"] == 19
    assert figures["rejected p50"] == pytest.approx(2, rel=0.01)
    assert figures["recovery"] == 1.2
    assert (figures["resident MiB before"], figures["resident MiB peak"], figures["resident MiB after"]) == (100, 120, 120)
    assert figures["proportional MiB after"] == 80


def test_unmeasured_overload_has_no_figure() -> None:
    """A server that does not answer afterwards has not recovered; a worker may have ended before its memory was read."""
    gone = WorkerMemory(seconds=[], resident_mib=[], proportional_mib=[])
    figures = Overload(phase="at_once", offered=10, peak=10, before_ms=5.0, memory=[gone]).figures()

    assert figures == {"offered/s": 10, "peak/s": 10}
