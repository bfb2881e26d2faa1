"""The servers that can take part in a contest."""

import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from app.embedded.server import EmbeddedTriton
from app.settings.schema import Settings
from bench.harness.errors import ContestantError
from bench.harness.lineup import Lineup, comparisons
from bench.harness.processes import ROOT
from bench.harness.triton import Triton
from bench.models.repository import write_models
from bench.report.contests import Comparison


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Triton:
    """A Triton with the fixture models that is not started."""
    repository = tmp_path_factory.mktemp("models")
    write_models(repository)
    settings = Settings(model_repository=str(repository))
    return Triton(settings, psutil.Process(), EmbeddedTriton(settings))


def test_a_counterpart_differs_only_in_its_checkout(triton: Triton, tmp_path: Path) -> None:
    lineup = Lineup(triton, 3, tmp_path, settings={"NEREID_DECODE_THREADS": "4"}, before=tmp_path)
    contestant, counterpart = lineup.contestant("nereid_shm", "null"), lineup.contestant("nereid_shm@before", "null")

    assert (contestant.checkout, counterpart.checkout) == (ROOT, tmp_path)
    assert contestant.command[0] == sys.executable
    same = {"name": "", "checkout": ROOT, "port": 1, "environment": {}}
    assert msgspec.structs.replace(contestant, **same) == msgspec.structs.replace(counterpart, **same)
    assert contestant.environment | {"NEREID_PORT": ""} == counterpart.environment | {"NEREID_PORT": ""}
    assert contestant.environment["NEREID_TRANSPORT"] == "shm"
    assert contestant.environment["NEREID_DECODE_THREADS"] == "4"


def test_a_counterpart_may_be_the_one_file(triton: Triton, tmp_path: Path) -> None:
    file = tmp_path / "nereid"
    file.touch()
    lineup = Lineup(triton, 2, tmp_path, before=file)
    contestant, counterpart = lineup.contestant("nereid_shm", "null"), lineup.contestant("nereid_shm@before", "null")

    assert (counterpart.command, counterpart.checkout) == ([str(file), "api"], ROOT)
    assert contestant.environment | {"NEREID_PORT": ""} == counterpart.environment | {"NEREID_PORT": ""}


def test_a_contestant_uses_the_variant_of_the_model_that_suits_it(triton: Triton, tmp_path: Path) -> None:
    lineup = Lineup(triton, 1, tmp_path)

    assert lineup.contestant("nereid_inline", "null").model == "null"
    assert lineup.contestant("nereid_file", "null").model == "null_file"
    assert lineup.contestant("batch1", "sim_gpu_batch1").model == "sim_gpu_batch1_file"
    with pytest.raises(ContestantError, match="there is no yolo11n_file"):
        lineup.contestant("nereid_file", "yolo11n")
    with pytest.raises(ContestantError, match="no other checkout"):
        lineup.contestant("nereid_file@before", "null")


def test_contestants_are_compared_with_the_bases_before_them_and_with_their_counterparts() -> None:
    names = ["reference", "reference_uint8", "nereid_shm", "nereid_shm@before"]

    assert comparisons(names) == [
        Comparison("reference", [(name, "reference") for name in names[1:]]),
        Comparison("reference_uint8", [(name, "reference_uint8") for name in names[2:]]),
        Comparison("their @before counterparts", [("nereid_shm", "nereid_shm@before")]),
    ]
    assert comparisons(["nereid_shm"]) == []
