"""How many cores this process and its siblings may use, and what it has used."""

import subprocess
import sys

import pytest

from app.host import cores
from tests.support import ROOT


def test_cores_are_those_that_the_scheduler_allows() -> None:
    code = """
import os
from app.host import cores
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
print(cores.available() <= 1)
"""
    output = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout

    assert output == "True\n"


@pytest.mark.parametrize(
    ("workers", "instances", "available", "count"),
    [(0, 0, 8, 8), (0, 1, 8, 8), (0, 3, 8, 2), (0, 64, 8, 1), (0, 0, 0.5, 1), (0, 0, 2.5, 2), (5, 0, 8, 5), (5, 3, 8, 5)],
)
def test_workers_are_one_per_core_unless_they_are_counted(
    monkeypatch: pytest.MonkeyPatch, workers: int, instances: int, available: float, count: int
) -> None:
    monkeypatch.setattr(cores, "available", lambda: available)

    assert cores.workers(workers, instances) == count


def test_cpu_use_of_a_process_is_averaged_since_its_start() -> None:
    program = """
import time
from app.host import cores
used, clock = time.process_time(), time.clock_gettime
busy = cores.used_percent()
time.clock_gettime = lambda which: clock(which) + 3600
print(cores.used_percent(), 100 * used / 60, busy)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    an_hour_later, least, busy = map(float, done.stdout.split())

    assert 0 < an_hour_later < least < busy <= 110
