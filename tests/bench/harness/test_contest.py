"""Contests between real servers, with the fixture models."""

from pathlib import Path

import pytest

from bench.harness.contest import Load, hold_contest, measure
from bench.harness.errors import ContestantError
from bench.harness.lineup import Lineup
from bench.harness.processes import ROOT
from bench.harness.triton import Triton
from bench.load.images import SAMPLE_FOLDER, unlabelled_samples
from bench.report.contest_text import contest_text
from tests.bench.support import needs_reference

LOAD = Load(unlabelled_samples(SAMPLE_FOLDER), clients=2, seconds=0.3)


def test_nereid_is_measured_beside_another_checkout_of_itself(fixtures: Triton, tmp_path: Path) -> None:
    messages: list[str] = []
    lineup = Lineup(fixtures, 1, tmp_path, before=ROOT)
    contestants = [("nereid_file", "yolo11n"), ("nereid_shm", "null"), ("nereid_shm@before", "null")]
    contest = hold_contest("a contest", contestants, lineup, LOAD, 2, messages.append)

    assert [entry.name for entry in contest.entries] == ["nereid_shm", "nereid_shm@before"]
    assert contest.left_out == {"nereid_file": "there is no yolo11n_file, a model that takes the encoded file"}
    for entry in contest.entries:
        assert entry.model == "null"
        assert entry.median("errors %") == 0
        assert len(entry.resident_mib) == 1
        assert entry.resident_mib[0] > entry.unshared_mib[0] > 10
        for one in entry.rounds:
            assert list(one.outcome.statuses) == ["200"]
            assert set(one.cpu_ms) == {"gateway", "triton", "stubs", "client"}
            assert one.triton is not None
            assert one.triton.inferences == one.outcome.requests
    assert [comparison.pairs for comparison in contest.comparisons] == [[("nereid_shm", "nereid_shm@before")]]
    assert "against their @before counterparts" in contest_text(contest)
    assert [message.partition(":")[0] for message in messages] == ["nereid_file is left out", *["a contest"] * 4]


@needs_reference
def test_the_model_of_a_server_that_does_not_name_it_is_the_one_it_was_told_to_use(fixtures: Triton, tmp_path: Path) -> None:
    """The reference's answers do not tell which model has answered."""
    contest = hold_contest("", [("reference", "null")], Lineup(fixtures, 1, tmp_path), LOAD, 1)

    assert [entry.model for entry in contest.entries] == ["null_fp32"]


def test_a_server_that_ends_during_a_contest_is_one_line(fixtures: Triton, tmp_path: Path) -> None:
    lineup = Lineup(fixtures, 1, tmp_path)
    contestant = lineup.contestant("nereid_inline", "null")
    with lineup.start(contestant) as server:
        pass

    with pytest.raises(ContestantError, match=f"{contestant.port} does not accept connections any more"):
        measure(contestant, server, [fixtures], LOAD)
