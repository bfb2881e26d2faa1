"""The cores and the memory that the control groups around this process leave to it."""

import os
from pathlib import Path

import pytest

from app.host import cgroup, cores, memory

CORES = float(len(os.sched_getaffinity(0)))
HOST = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
SERVICE = "system.slice/nereid.service"
VERSION_2, NESTED = "0::/\n", f"0::/{SERVICE}\n"
VERSION_1 = f"4:memory:/{SERVICE}\n3:cpu,cpuacct:/{SERVICE}\n1:name=systemd:/{SERVICE}\n0::/\n"


@pytest.mark.parametrize(
    ("own", "files", "expected"),
    [
        (VERSION_2, {}, (CORES, HOST)),
        (VERSION_2, {"cpu.max": "max 100000\n", "memory.max": "max\n"}, (CORES, HOST)),
        (VERSION_2, {"cpu.max": "", "memory.max": ""}, (CORES, HOST)),
        (VERSION_2, {"cpu.max": "50000 100000\n", "memory.max": "1073741824\n"}, (0.5, 2**30)),
        (VERSION_2, {"cpu.max": "900000000 100000\n", "memory.max": f"{HOST + 1}\n"}, (CORES, HOST)),
        (None, {"cpu.max": "50000 100000\n", "memory.max": "1073741824\n"}, (0.5, 2**30)),
        (NESTED, {f"{SERVICE}/cpu.max": "25000 100000\n", f"{SERVICE}/memory.max": "1073741824\n"}, (0.25, 2**30)),
        (NESTED, {"system.slice/cpu.max": "50000 100000\n", "system.slice/memory.max": "1073741824\n"}, (0.5, 2**30)),
        (NESTED, {"cpu.max": "50000 100000\n", f"{SERVICE}/cpu.max": "25000 100000\n", "memory.max": "1\n"}, (0.25, 1)),
        (NESTED, {f"{SERVICE}/memory.max": "2\n", "system.slice/memory.max": "1\n", "memory.max": "max\n"}, (CORES, 1)),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "50000\n", "cpu/cpu.cfs_period_us": "100000\n"}, (0.5, HOST)),
        (VERSION_1, {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, (CORES, HOST)),
        (
            VERSION_1,
            {f"cpu/{SERVICE}/{name}": f"{n}\n" for name, n in (("cpu.cfs_quota_us", 1), ("cpu.cfs_period_us", 4))},
            (0.25, HOST),
        ),
        (VERSION_1, {"memory/memory.limit_in_bytes": "1073741824\n", "memory.max": "max\n"}, (CORES, 2**30)),
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
