"""The measurement of batches: what is sent, and how the ratios come about."""

from pathlib import Path

import pytest

from bench.__main__ import main
from bench.experiments.batch import Round
from bench.load.images import SAMPLE_FOLDER


def test_a_batch_is_compared_with_the_longer_of_decoding_and_model() -> None:
    """48 ms is the time of the simulated GPU."""
    assert Round(140, 10, 180, 100, 250).latency_ratio == pytest.approx(1.2)
    assert Round(20, 12, 90, 100, 250).latency_ratio == pytest.approx(1.5)
    assert Round(20, 12, 90, 100, 250).throughput_ratio == pytest.approx(2.5)


def test_rounds_and_medians_are_printed(capsys: pytest.CaptureFixture[str]) -> None:
    folder: Path = SAMPLE_FOLDER
    assert main(["batch", "--rounds", "1", "--seconds", "0.5", "--workers", "1", "--images", str(folder)]) == 0
    head, columns, line, latency, throughput = capsys.readouterr().out.splitlines()

    assert head.startswith("sim_gpu, 64 images of ")
    assert columns.split()[:2] == ["decoding", "ms"]
    assert len(line.split()) == 7
    assert latency.startswith("a batch takes ")
    assert throughput.endswith("the throughput, 4 clients")
