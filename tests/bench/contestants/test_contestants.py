"""The servers Nereid is measured against."""

import sys
from pathlib import Path

import pytest

from app.host.ports import find_free, is_free
from bench.harness.counters import read_counters
from bench.harness.entrants import Lineup
from bench.harness.meters import MIB, cpu_seconds, family, worker_memory
from bench.harness.processes import running
from bench.harness.triton import Triton
from bench.load.closed import drive_closed
from bench.load.driver import run
from bench.load.images import SAMPLE_FOLDER, Sample, unlabelled_samples
from tests.bench.support import abandoned_arenas, needs_reference
from tests.support import sample_image

SAMPLE = Sample("coffee", sample_image("coffee.jpg"), frozenset())


@needs_reference
@pytest.mark.parametrize("name", ["reference", "reference_uint8", "broken"])
def test_a_contestant_answers(fixtures: Triton, tmp_path: Path, name: str) -> None:
    """Each contestant starts, takes images as Nereid does, and stops without leaving a process behind."""
    lineup = Lineup(fixtures, 1, tmp_path)
    entrant = lineup.entrant(name, "null")
    with lineup.start(entrant) as server:
        load = drive_closed(f"{server.url}/detect", unlabelled_samples(SAMPLE_FOLDER), clients=2, seconds=20, requests=6)
        outcome = run(load)
        (memory,) = worker_memory(server.process, 1)
        assert sum(map(cpu_seconds, family(server.process))) > 0

    assert outcome.statuses == {"200": 6}
    assert memory.resident > 10 * MIB
    assert is_free("127.0.0.1", entrant.port)


@pytest.mark.parametrize("with_triton", [False, True])
def test_the_least_that_a_server_can_do_answers(fixtures: Triton, tmp_path: Path, with_triton: bool) -> None:  # noqa: FBT001
    """With a Triton, each body reaches it, and no shared memory is left behind."""
    (port,) = find_free(1)
    command = [sys.executable, "-m", "bench.contestants.http_only", str(port), "1"]
    before, arenas = read_counters(fixtures.url, "null_file"), abandoned_arenas()
    triton = fixtures.settings.triton_url if with_triton else ""
    with running(command, {"BENCH_TRITON": triton}, port, "/", tmp_path / "log") as server:
        outcome = run(drive_closed(f"{server.url}/detect", [SAMPLE], clients=4, seconds=30, requests=20))

    assert outcome.statuses == {"200": 20}
    assert read_counters(fixtures.url, "null_file").since(before).inferences == (20 if with_triton else 0)
    assert abandoned_arenas() <= arenas
