"""CPU time by step, and the candidates it is measured for."""

import subprocess
from pathlib import Path
from typing import Any

import pytest

from bench.experiments.candidates.registry import CANDIDATES
from bench.experiments.stages import IMAGE_STEPS, Spent, describe, spend, turns
from bench.harness.triton import Triton
from tests.bench.support import arenas_of
from tests.support import sample_image

PROGRAM = """
import json, os, sys
print("a line of a log")
print(json.dumps({"images": 7, "seconds": 0.1, "milliseconds": {sys.argv[1] + " in " + os.getcwd(): 1.5}, "more": 1}))
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    folder = tmp_path / "images"
    folder.mkdir()
    (folder / "image").write_bytes(sample_image("coffee.jpg"))
    return folder


@pytest.mark.parametrize("name", sorted(CANDIDATES.keys() - {"reference"}))
def test_a_candidate_runs(fixtures: Triton, files: Path, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pids: list[int] = []

    class Noted(subprocess.Popen):  # type: ignore[type-arg]
        def __init__(self, *arguments: Any, **options: Any) -> None:  # noqa: ANN401
            super().__init__(*arguments, **options)
            pids.append(self.pid)

    monkeypatch.setattr(subprocess, "Popen", Noted)
    (spent,) = spend(name, files, 0.05, triton=fixtures.settings)

    assert spent.images > 0
    assert {"decode", "letterbox", "free"} <= spent.milliseconds.keys()
    assert ({"client", "framework", "encode"} <= spent.milliseconds.keys()) is name.startswith("nereid")
    assert pids
    assert not arenas_of(pids)


def test_a_candidate_does_not_run_out_of_slots(fixtures: Triton, files: Path) -> None:
    (spent,) = spend("nereid_shm", files, 1.0, steps=["header", "decode", "letterbox", "client"], triton=fixtures.settings)

    assert spent.images > 32


def test_only_the_steps_asked_for_run(files: Path) -> None:
    spent = spend("nereid", files, 0.05, processes=2, steps=IMAGE_STEPS)

    assert [set(one.milliseconds) for one in spent] == [{*IMAGE_STEPS, "free"}] * 2


def test_a_counterpart_runs_from_its_checkout(tmp_path: Path, files: Path) -> None:
    checkout = tmp_path / "checkout"
    path = checkout / "bench" / "experiments" / "candidates" / "__main__.py"
    path.parent.mkdir(parents=True)
    path.write_text(PROGRAM)

    assert spend("nereid@before", files, 0.05, checkout=checkout) == [Spent(0.1, {f"nereid in {checkout}": 1.5}, 7)]


def test_counterparts_run_in_turn_with_the_candidates_of_this_checkout() -> None:
    """Candidates that do not measure Nereid have no counterpart."""
    assert turns(has_before=True)[:4] == ["nereid", "nereid@before", "nereid_shm", "nereid_shm@before"]
    assert [name for name in turns(has_before=True) if "@" not in name] == turns(has_before=False) == list(CANDIDATES)


def test_a_candidate_is_described_by_its_medians_and_compared_with_its_counterpart() -> None:
    spent = {
        "nereid": [Spent(1.0, {"decode": decode, "new": 1.0}) for decode in (1.0, 2.0, 3.0)],
        "nereid@before": [Spent(1.0, {"decode": decode}) for decode in (2.0, 4.0, 4.0)],
        "opencv": [Spent(1.0, {"decode": 5.0})],
    }
    *lines, ratios = describe(spent)

    assert lines == [
        "nereid          3.00 = decode 2.000, new 1.000",
        "nereid@before   4.00 = decode 4.000",
        "opencv          5.00 = decode 5.000",
    ]
    assert ratios.startswith("nereid against nereid@before, median of the runs' ratios (min..max): ")
    assert ratios.endswith(": total 1.00 x (0.75..1.00), decode 0.50 x (0.50..0.75)")
