"""The limits of the machine."""

from pathlib import Path

from bench.experiments.limit import measure_http
from bench.harness.contest import Load
from bench.harness.triton import Triton
from bench.load.images import SAMPLE_FOLDER, unlabelled_samples


def test_http_alone_and_with_triton_are_measured(fixtures: Triton, tmp_path: Path) -> None:
    load = Load(unlabelled_samples(SAMPLE_FOLDER), clients=2, seconds=0.3)

    for triton in (None, fixtures.settings):
        cost = measure_http(tmp_path, load, 1, triton)
        assert cost.rate > 0
        assert cost.cpu_ms > 0
