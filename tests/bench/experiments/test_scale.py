"""`bench scale`, with real gateways and real Tritons."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.__main__ import main
from bench.experiments import scale
from bench.harness.contest import Load, measure
from bench.harness.lineup import Contestant
from bench.harness.processes import Running
from bench.harness.triton import Triton
from bench.load.images import SAMPLE_FOLDER
from bench.report.measurements import Measurement
from bench.report.records import load_record
from bench.report.scaling import scaling_text
from tests.processes import no_process_left

OPTIONS = ["--workers", "1", "--clients", "1", "4", "--rounds", "1", "--seconds", "0.4", "--images", str(SAMPLE_FOLDER)]


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_scaling_goes_from_the_command_line_to_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All images are answered, all Tritons get some, and what is printed and what is saved agree."""
    file = tmp_path / "out.json"

    with no_process_left():
        assert main(["scale", "--over", "tritons", "--tritons", "1", "2", *OPTIONS, "--json", str(file)]) == 0
    record = load_record(file)
    (scaling,) = record.scalings
    assert record.settings["tritons"] == "1, 2"
    assert [(point.clients, point.tritons, point.workers) for point in scaling.points] == [
        (1, 1, 1),
        (1, 2, 1),
        (4, 1, 1),
        (4, 2, 1),
    ]
    for point in scaling.points:
        (one,) = point.rounds
        assert list(one.outcome.statuses) == ["200"]
        assert len(one.images_by_triton) == point.tritons
        assert sum(one.images_by_triton) == one.outcome.requests
        assert 0 < sum(one.calls.values()) <= one.outcome.requests
    assert min(scaling.points[3].images) > 0
    assert scaling_text(scaling) in capsys.readouterr().out


def test_what_was_complete_is_kept_after_a_ctrl_c(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "out.json"
    loads: list[int] = []

    def interrupt(contestant: Contestant, server: Running, tritons: Sequence[Triton], load: Load) -> Measurement:
        loads.append(load.clients)
        if len(loads) == 3:  # after the warm-up and the first point
            raise KeyboardInterrupt
        return measure(contestant, server, tritons, load)

    monkeypatch.setattr(scale, "measure", interrupt)
    with no_process_left():
        assert main(["scale", "--over", "workers", *OPTIONS, "--json", str(file)]) == 130
    assert loads == [4, 1, 4]
    (scaling,) = load_record(file).scalings
    assert [len(point.rounds) for point in scaling.points] == [1, 0]
    captured = capsys.readouterr()
    assert scaling_text(scaling) in captured.out
    assert "stopped" in captured.err
