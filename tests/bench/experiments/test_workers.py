"""The measurement of numbers of processes and threads, with made-up results."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from app.settings.schema import Settings
from bench.__main__ import main
from bench.experiments import workers
from bench.harness.contest import Load
from bench.harness.lineup import Lineup
from bench.harness.triton import Triton
from bench.load.images import SAMPLE_FOLDER
from bench.models.repository import write_models
from bench.report.measurements import Measurement
from tests.bench.support import make_measurement

Case = tuple[int, int]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Processes and threads of each server that is measured on a machine of two cores; the more of both, the faster it is."""
    cases: list[Case] = []

    @contextmanager
    def no_triton() -> Iterator[Triton]:
        write_models(tmp_path / "models")
        yield Triton(Settings(model_repository=str(tmp_path / "models")), psutil.Process())

    def measure_alone(lineup: Lineup, name: str, model: str, load: Load) -> Measurement:
        contestant = lineup.contestant(name, model)
        assert (name, model, load.clients, load.seconds, len(load.samples)) == ("nereid_shm", "null", 3, 0.5, 3)
        case = int(contestant.environment["NEREID_WORKERS"]), int(contestant.environment["NEREID_DECODE_THREADS"])
        cases.append(case)
        return make_measurement(100.0 * case[0] + 10 * case[1] + len(cases) // 13)

    monkeypatch.setattr(workers, "fixture_triton", no_triton)
    monkeypatch.setattr(workers, "measure_alone", measure_alone)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    return cases


def test_each_combination_is_measured_in_every_round(measured: list[Case], capsys: pytest.CaptureFixture[str]) -> None:
    """One process, one per core, one more, and twice as many plus one, with one, two and four threads; rounds are interleaved."""
    assert main(["workers", "--rounds", "3", "--seconds", "0.5", "--clients", "3", "--images", str(SAMPLE_FOLDER)]) == 0
    head, columns, *lines = capsys.readouterr().out.splitlines()

    expected = [(processes, threads) for processes in (1, 2, 3, 5) for threads in (1, 2, 4)]
    assert measured == expected * 3
    assert head == "2 cores, 3 clients, null model, medians of 3 interleaved rounds of 0.5 s"
    assert columns.split()[0] == "workers"
    assert [tuple(map(int, line.split()[:3])) for line in lines] == [
        (processes, threads, 100 * processes + 10 * threads + 1) for processes, threads in expected
    ]
