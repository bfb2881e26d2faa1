"""Answers from the cache beside inferences."""

import pytest

from bench.__main__ import main
from bench.experiments.cache import FLOOR, IN_MEMORY, IN_REDIS, OBJECTS
from tests.programs import require_program

HITS = [f"{where}{model}" for where in (IN_MEMORY, IN_REDIS) for model in ("", OBJECTS)]
INFERENCES = ["inference, nereid_shm", "inference, nereid_file"]


def test_hits_are_measured_and_not_inferences(capsys: pytest.CaptureFixture[str]) -> None:
    require_program("redis-server", "redis-server")
    assert main(["cache", "--seconds", "1", "--rounds", "1"]) == 0

    lines = capsys.readouterr().out.splitlines()
    shares = {name: line.split()[-1] for line in lines for name in (FLOOR, *HITS, *INFERENCES) if line.startswith(f"{name}  ")}
    assert shares.pop(FLOOR) == "-"
    assert list(shares) == [*HITS, *INFERENCES]
    # On a busy machine, Redis sometimes takes longer than it may, and the picture is inferred again.
    assert all(float(share) < 0.5 for name, share in shares.items() if name in HITS), shares
    assert {shares[name] for name in INFERENCES} == {"1.000"}
