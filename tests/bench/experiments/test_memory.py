"""The memory of workers over many requests."""

from pathlib import Path

import pytest

from bench.experiments import memory
from bench.harness.contest import Load
from bench.harness.lineup import Lineup
from bench.harness.triton import Triton
from bench.load.images import SAMPLE_FOLDER, unlabelled_samples


def test_memory_is_printed_after_every_step(
    fixtures: Triton, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "REQUESTS", 30)
    monkeypatch.setattr(memory, "STEP", 10)
    load = Load(unlabelled_samples(SAMPLE_FOLDER), clients=2, seconds=1)
    memory.show_memory([("nereid_file", "null"), ("nereid_file@before", "null")], Lineup(fixtures, 1, tmp_path), load)
    _, head, measured, left_out = capsys.readouterr().out.splitlines()

    assert head == "MiB of each of 1 workers after 10, 20 ... 30 requests a worker (unshared in brackets)"
    assert measured.startswith("nereid_file ")
    assert measured.partition(";")[0].count("(") == 3
    assert measured.endswith("MiB unshared per 10 requests since the 20th")
    assert left_out.startswith("nereid_file@before is left out: there is no other checkout")
