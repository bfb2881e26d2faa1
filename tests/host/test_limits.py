"""The cores and the memory that this process may use, what it gives back, what is installed, and tables that are written."""

import os
import re
import subprocess
import sys
import tomllib
from importlib.metadata import packages_distributions
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.host import allocator, cgroup, cores, extras, memory, toml
from tests.support import ROOT

CORES = float(len(os.sched_getaffinity(0)))
HOST = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
SERVICE = "system.slice/nereid.service"
VERSION_2, NESTED = "0::/\n", f"0::/{SERVICE}\n"
VERSION_1 = f"4:memory:/{SERVICE}\n3:cpu,cpuacct:/{SERVICE}\n1:name=systemd:/{SERVICE}\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (VERSION_2, {"cpu.max": "max 100000\n", "memory.max": "max\n"}, (CORES, HOST)),
        (VERSION_2, {"cpu.max": "", "memory.max": ""}, (CORES, HOST)),
        (VERSION_2, {"cpu.max": "50000 100000\n", "memory.max": "1073741824\n"}, (0.5, 2**30)),
        (VERSION_2, {"cpu.max": "900000000 100000\n", "memory.max": f"{HOST + 1}\n"}, (CORES, HOST)),
        (None, {"cpu.max": "50000 100000\n", "memory.max": "1073741824\n"}, (0.5, 2**30)),
        (NESTED, {"system.slice/cpu.max": "50000 100000\n", "system.slice/memory.max": "1073741824\n"}, (0.5, 2**30)),
        (NESTED, {"cpu.max": "50000 100000\n", f"{SERVICE}/cpu.max": "25000 100000\n", "memory.max": "1\n"}, (0.25, 1)),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, (CORES, HOST)),
        (VERSION_1, {f"cpu/{SERVICE}/cpu.cfs_quota_us": "1\n", f"cpu/{SERVICE}/cpu.cfs_period_us": "4\n"}, (0.25, HOST)),
        (VERSION_1, {"memory/memory.limit_in_bytes": "9223372036854771712\n"}, (CORES, HOST)),
        (VERSION_1, {f"memory/{SERVICE}/memory.limit_in_bytes": "1\n", "memory/memory.limit_in_bytes": "2\n"}, (CORES, 1)),
        (VERSION_1, {"memory/system.slice/memory.limit_in_bytes": "1\n"}, (CORES, 1)),
        (None, {"memory/memory.limit_in_bytes": "1073741824\n"}, (CORES, 2**30)),
    ],
)
def test_the_least_limit_of_all_groups_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str | None, files: dict[str, str], expected: tuple[float, int]
) -> None:
    for name, content in files.items():
        path = tmp_path / "groups" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="ascii")
    if own is not None:
        (tmp_path / "own").write_text(own, encoding="ascii")
    monkeypatch.setattr(cgroup, "_GROUPS", tmp_path / "groups")
    monkeypatch.setattr(cgroup, "_OWN_GROUPS", tmp_path / "own")
    assert (cores.available(), memory.available_bytes()) == expected


def test_images_have_an_eighth_of_the_memory_unless_it_is_set() -> None:
    """The largest image always has room."""
    assert 2**26 < memory.available_bytes() <= HOST
    assert memory.image_budget(100, 1) == 100 * 2**20
    assert memory.image_budget(0, 1) == memory.available_bytes() // 8
    assert memory.image_budget(100, 200 * 2**20) == 200 * 2**20


@pytest.mark.parametrize(
    ("workers", "instances", "available", "count"),
    [(0, 0, 8, 8), (0, 3, 8, 2), (0, 64, 8, 1), (0, 0, 0.5, 1), (0, 0, 2.5, 2), (5, 3, 8, 5)],
)
def test_workers_are_one_per_core_unless_they_are_counted(
    monkeypatch: pytest.MonkeyPatch, workers: int, instances: int, available: float, count: int
) -> None:
    monkeypatch.setattr(cores, "available", lambda: available)
    assert cores.workers(workers, instances) == count
    assert cores.workers_of_host(workers, instances) == count * max(1, instances)


def measure(program: str) -> list[float]:
    """Return the numbers that a program prints in a process of its own."""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    return list(map(float, done.stdout.split()))


def test_cores_are_those_of_the_scheduler_and_their_use_is_averaged_since_the_start() -> None:
    available, an_hour_later, least, busy = measure("""
import os, time
from app.host import cores
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
used, clock = time.process_time(), time.clock_gettime
busy = cores.used_percent()
time.clock_gettime = lambda which: clock(which) + 3600
print(cores.available(), cores.used_percent(), 100 * used / 60, busy)
""")
    assert available <= 1
    assert 0 < an_hour_later < least < busy <= 110


def test_freed_memory_is_used_again_and_that_of_a_burst_can_be_returned() -> None:
    """A block of 4 MiB is not mapped and zeroed again for each allocation, as it is with the defaults of glibc."""
    default, kept, returned = measure("""
import resource
from app.host import allocator, memory

def faults():
    for _ in range(3):
        for _ in range(20):
            block = bytes(4 << 20)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        for _ in range(20):
            block = None
            block = bytes(4 << 20)
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

default = faults()
allocator.keep_freed_memory()
kept = faults()
burst = [bytes(100_000) for _ in range(2000)]
last = bytes(100_000)
del burst
before = memory.resident_bytes()
allocator.return_freed_memory()
print(default, kept, before - memory.resident_bytes())
""")
    assert kept < default / 10
    assert returned > 100 << 20


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other C libraries have no `mallopt`."""
    monkeypatch.setattr("ctypes.CDLL", lambda _: SimpleNamespace())
    allocator.keep_freed_memory()
    allocator.return_freed_memory()


def test_extras_are_those_of_the_package() -> None:
    declared: dict[str, list[str]] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (everything,) = declared.pop("all")
    distributions = packages_distributions()
    assert set(re.split(r"[\[\],]", everything)[1:-1]) | {"cache"} == declared.keys()
    assert extras.MODULES.keys() == declared.keys() - {"models"}
    for extra, modules in extras.MODULES.items():
        named = " ".join(declared[extra]).replace("nereid-gateway[cache]", " ".join(declared["cache"]))
        for module in modules:
            assert any(name.replace("_", "-") in named for name in distributions[module.partition(".")[0]])


PROGRAM = """
import sys
sys.modules.update(dict.fromkeys({absent}))
from app.host import extras
missing = [extras.missing(extra) for extra in {extras}]
loaded = {{each for modules in extras.MODULES.values() for each in modules}} & {{*sys.modules}} - {absent}
print(missing, loaded)
"""


@pytest.mark.parametrize(
    ("names", "absent", "missing"),
    [
        ([*extras.MODULES], [], [""] * len(extras.MODULES)),
        (["search"], ["asyncpg", "pgvector", "redis"], ["asyncpg, pgvector"]),
        (["otel"], ["opentelemetry.exporter"], ["opentelemetry.exporter.otlp.proto.http"]),
        (["otel"], ["opentelemetry"], ["opentelemetry.sdk, opentelemetry.exporter.otlp.proto.http"]),
    ],
)
def test_missing_modules_of_an_extra_are_named_without_importing_others(
    names: list[str], absent: list[str], missing: list[str]
) -> None:
    program = PROGRAM.format(extras=names, absent=set(absent))
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert ran.stdout == f"{missing} set()\n"


def test_tables_of_tables_are_read_as_they_were() -> None:
    content = {
        "name": 'says "no"\\ é',
        "share": 1e-7,
        "labels": ["a", "b"],
        "v1.doors": {"to": "x", "canary": {"share": 0.5, "is on": True}},
        "empty": {},
    }
    assert tomllib.loads(toml.dump({**content, "nothing": None})) == content
