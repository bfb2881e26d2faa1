"""Who can take part in a contest."""

import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from app.config import Settings
from bench.harness.entrants import Lineup, add_twins, comparisons
from bench.harness.errors import ContestantError
from bench.harness.processes import ROOT
from bench.harness.triton import Triton
from bench.models.repository import write_models
from bench.report.records import Comparison


@pytest.fixture(scope="module")
def triton(tmp_path_factory: pytest.TempPathFactory) -> Triton:
    """A Triton that does not run, with the fixture models."""
    repository = tmp_path_factory.mktemp("models")
    write_models(repository)
    return Triton(Settings(model_repository=str(repository), triton_grpc_port=12345), psutil.Process())


def test_a_twin_differs_only_in_its_checkout(triton: Triton, tmp_path: Path) -> None:
    """Interpreter, settings and model are the same; the note names the checkout."""
    lineup = Lineup(triton, 3, tmp_path, settings={"NEREID_DECODE_THREADS": "4"}, before=tmp_path)
    entrant, twin = lineup.entrant("nereid_shm", "null"), lineup.entrant("nereid_shm@before", "null")

    assert (entrant.checkout, twin.checkout) == (ROOT, tmp_path)
    assert str(tmp_path) in twin.note
    assert entrant.command[0] == sys.executable
    same = {"name": "", "note": "", "checkout": ROOT, "port": 1, "environment": {}}
    assert msgspec.structs.replace(entrant, **same) == msgspec.structs.replace(twin, **same)
    assert entrant.environment | {"NEREID_PORT": ""} == twin.environment | {"NEREID_PORT": ""}
    assert entrant.environment["NEREID_TRANSPORT"] == "shm"
    assert entrant.environment["NEREID_DECODE_THREADS"] == "4"


def test_an_entrant_asks_the_variant_of_the_model_that_suits_it(triton: Triton, tmp_path: Path) -> None:
    """Files go to a model that takes them; without one, or without another checkout, an entrant cannot take part."""
    lineup = Lineup(triton, 1, tmp_path)

    assert lineup.entrant("nereid_inline", "null").model == "null"
    assert lineup.entrant("nereid_file", "null").model == "null_file"
    assert lineup.entrant("batch1", "sim_gpu_batch1").model == "sim_gpu_batch1_file"
    with pytest.raises(ContestantError, match="there is no yolo11n_file"):
        lineup.entrant("nereid_file", "yolo11n")
    with pytest.raises(ContestantError, match="no other checkout"):
        lineup.entrant("nereid_file@before", "null")


def test_only_entrants_of_nereid_have_twins() -> None:
    """Each stands right behind the one it is compared with."""
    assert add_twins(["reference", "nereid_inline", "nereid_file"]) == [
        "reference",
        "nereid_inline",
        "nereid_inline@before",
        "nereid_file",
        "nereid_file@before",
    ]


def test_entrants_are_compared_with_the_bases_before_them_and_with_their_twins() -> None:
    """A base is not compared with one that comes after it; a comparison without pairs is left out."""
    names = ["reference", "reference_uint8", "nereid_shm", "nereid_shm@before"]

    assert comparisons(names) == [
        Comparison("reference", [(name, "reference") for name in names[1:]]),
        Comparison("reference_uint8", [(name, "reference_uint8") for name in names[2:]]),
        Comparison("their @before twins", [("nereid_shm", "nereid_shm@before")]),
    ]
    assert comparisons(["nereid_shm"]) == []
