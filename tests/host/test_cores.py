"""How many cores this process and its siblings may use, and what it has used."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from app.host import cores
from tests.support import ROOT

SCHEDULED = float(len(os.sched_getaffinity(0)))
VERSION_1 = "10:cpu:/\n"
VERSION_2 = "0::/\n"
NESTED = "0::/system.slice/nereid.service\n"


@pytest.mark.parametrize(
    ("own_group", "files", "expected"),
    [
        (VERSION_2, {}, SCHEDULED),
        (VERSION_2, {"cpu.max": "max 100000\n"}, SCHEDULED),
        (VERSION_2, {"cpu.max": "50000 100000\n"}, 0.5),
        (VERSION_2, {"cpu.max": "900000000 100000\n"}, SCHEDULED),
        (NESTED, {"system.slice/nereid.service/cpu.max": "25000 100000\n"}, 0.25),
        (NESTED, {"system.slice/nereid.service/cpu.max": "max 100000\n", "system.slice/cpu.max": "50000 100000\n"}, 0.5),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, SCHEDULED),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 0.5),
        (None, {"cpu.max": "50000 100000\n"}, 0.5),
        (VERSION_2, {"cpu.max": ""}, SCHEDULED),
    ],
    ids=[
        "no files",
        "no quota",
        "quota",
        "more than there is",
        "of a service",
        "of a slice",
        "no quota of version 1",
        "quota of version 1",
        "no list of groups",
        "empty",
    ],
)
def test_cores_are_those_of_the_container_if_it_has_less(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_group: str | None, files: dict[str, str], expected: float
) -> None:
    """The kernel tells the quota in files of the control groups that contain this process."""
    for name, content in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="ascii")
    if own_group is not None:
        (tmp_path / "own").write_text(own_group, encoding="ascii")
    monkeypatch.setattr(cores, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cores, "_OWN_GROUP", tmp_path / "own")

    assert cores.available() == expected


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
    """Several instances share the cores; a number of workers is that of each instance."""
    monkeypatch.setattr(cores, "available", lambda: available)

    assert cores.workers(workers, instances) == count


def test_what_a_process_uses_is_counted_from_its_start() -> None:
    """Idle time lowers the value."""
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
