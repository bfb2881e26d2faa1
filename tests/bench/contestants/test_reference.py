"""The reference, in its own environment."""

from pathlib import Path

import pytest

from app.host.ports import is_free
from bench.harness.counters import read_counters
from bench.harness.lineup import Lineup
from bench.harness.meters import MIB, cpu_seconds, family, worker_memory
from bench.harness.triton import Triton
from bench.load.closed_loop import drive_closed_loop
from bench.load.driver import run
from bench.load.images import SAMPLE_FOLDER, unlabelled_samples
from tests.bench.support import needs_reference

pytestmark = needs_reference


@pytest.mark.parametrize(("name", "model"), [("reference", "null_fp32"), ("reference_uint8", "null")])
def test_the_reference_takes_images_as_nereid_does(fixtures: Triton, tmp_path: Path, name: str, model: str) -> None:
    lineup = Lineup(fixtures, 1, tmp_path)
    contestant = lineup.contestant(name, "null")
    before = read_counters(fixtures.address, model)
    with lineup.start(contestant) as server:
        load = drive_closed_loop(f"{server.url}/detect", unlabelled_samples(SAMPLE_FOLDER), clients=2, seconds=20, requests=6)
        outcome = run(load)
        (memory,) = worker_memory(server.process, 1)
        assert sum(map(cpu_seconds, family(server.process))) > 0

    assert outcome.statuses == {"200": 6}
    assert read_counters(fixtures.address, model).since(before).inferences == 6
    assert memory.resident > 10 * MIB
    assert is_free("127.0.0.1", contestant.port)
