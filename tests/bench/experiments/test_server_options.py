"""The measurement of server options: made-up results for the table, real signals for the renewal of workers."""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from app.embedded.server import EmbeddedTriton
from app.settings.schema import Settings
from bench.__main__ import main
from bench.experiments import server_options
from bench.harness.contest import Load
from bench.harness.lineup import Lineup
from bench.harness.processes import Running
from bench.harness.triton import Triton
from bench.load.images import SAMPLE_FOLDER
from bench.models.repository import write_models
from bench.report.measurements import Measurement
from tests.bench.support import make_measurement

OPTIONS = ["--rounds", "2", "--seconds", "0.5", "--clients", "3", "--images", str(SAMPLE_FOLDER)]
Case = tuple[str, int, bool, bool]


@pytest.fixture
def measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Workers, clients, kept connections and renewal of each case on a machine of two cores; the first is the fastest."""
    cases: list[Case] = []
    signalled: list[tuple[int, int]] = []
    server = Running("http://127.0.0.1:1", psutil.Process())

    @contextmanager
    def no_triton() -> Iterator[Triton]:
        write_models(tmp_path / "models")
        settings = Settings(model_repository=str(tmp_path / "models"))
        yield Triton(settings, psutil.Process(), EmbeddedTriton(settings))

    def measure_alone(lineup: Lineup, name: str, model: str, load: Load, disturb: Callable[[Running], None]) -> Measurement:
        disturb(server)
        given = lineup.contestant(name, model).environment
        is_renewed = signalled == [(os.getpid(), signal.SIGHUP)]
        signalled.clear()
        cases.append((given["NEREID_WORKERS"], load.clients, load.keep_alive, is_renewed))
        return make_measurement(100.0 if cases[-1] == cases[0] else 50.0)

    monkeypatch.setattr(server_options, "fixture_triton", no_triton)
    monkeypatch.setattr(server_options, "measure_alone", measure_alone)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr(os, "kill", lambda pid, number: signalled.append((pid, number)))
    return cases


def test_cases_differ_from_the_default_in_one_thing_each(measured: list[Case], capsys: pytest.CaptureFixture[str]) -> None:
    """Rounds are interleaved, and each line is compared with the first; only the last case renews the workers."""
    assert main(["options", *OPTIONS]) == 0
    _, _, first, *others, _ = capsys.readouterr().out.splitlines()

    usual = ("2", 3, True, False)
    assert measured == [usual, ("5", 3, True, False), ("2", 512, True, False), ("2", 3, False, False), ("2", 3, True, True)] * 2
    assert first.endswith("1.00 x (1.00..1.00)")
    assert len(others) == 4
    assert all(line.endswith("0.50 x (0.50..0.50)") for line in others)
