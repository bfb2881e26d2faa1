"""`bench overload`, with a real gateway and a real Triton."""

from pathlib import Path

import pytest

from bench.__main__ import main
from bench.harness.processes import ROOT
from bench.load.images import SAMPLE_FOLDER
from bench.report.overload_text import overload_text
from bench.report.records import load_record

pytestmark = pytest.mark.usefixtures("short_bursts")


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_overload_goes_from_the_command_line_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "out.json"
    options = ["--seconds", "0.6", "--workers", "1", "--images", str(SAMPLE_FOLDER), "--before", str(ROOT), "--json", str(file)]

    assert main(["overload", "--phases", "open_3", "polite", *options]) == 0
    runs = load_record(file).runs
    assert [(run.load, run.contestant) for run in runs] == [
        (phase, name) for phase in ("peak", "open_3", "polite") for name in ("nereid", "nereid@before")
    ]
    peaks = [run.overload.peak for run in runs[:2] if run.overload]
    for run in runs[2:]:
        assert run.overload
        assert run.model == "wait_20"
        assert run.overload.peak == max(peaks) > 0
        assert run.overload.before_ms
        (worker,) = run.overload.memory
        assert len(worker.seconds) > 1
    assert runs[2].rate == round(3 * max(peaks), 1)
    assert runs[4].clients == 512
    assert overload_text(runs) in capsys.readouterr().out


def test_a_server_that_does_not_start_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "app").mkdir()
    (tmp_path / "app" / "__main__.py").write_text("raise SystemExit('broken')", encoding="utf-8")
    file = tmp_path / "out.json"
    options = ["--seconds", "0.3", "--workers", "1", "--peak", "10", "--before", str(tmp_path), "--json", str(file)]

    assert main(["overload", "--phases", "open_3", *options]) == 0
    (run,) = load_record(file).runs
    assert (run.contestant, run.rate) == ("nereid", 30)
    assert "open_3: nereid@before is left out: exited with code 1: broken" in capsys.readouterr().err
