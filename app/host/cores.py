"""Available cores, and the CPU usage of this process."""

import math
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUP = Path("/proc/self/cgroup")
_OWN_STATE = Path("/proc/self/stat")
_STARTED_FIELD = 19  # after the name, which may contain spaces


def available() -> float:
    """Return the number of cores: the minimum of the CPU affinity and the CPU quota of the container."""
    return min([float(len(os.sched_getaffinity(0))), *_quotas()])


def workers(asked: int, instances: int) -> int:
    """Return the number of API processes per instance; `asked` 0 means one per core, divided among the instances."""
    return asked or max(1, math.floor(available()) // max(1, instances))


def used_percent() -> float:
    """Return the CPU usage of this process since its start, in percent of one core."""
    started = int(_read(_OWN_STATE).rpartition(")")[2].split()[_STARTED_FIELD]) / os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    return 100 * time.process_time() / max(age, 0.1)


def _quotas() -> Iterator[float]:
    for folder in _folders():
        with suppress(OSError, ValueError):  # not there, or "max"
            microseconds, period = _read(folder / "cpu.max").split()
            yield int(microseconds) / int(period)
    with suppress(OSError, ValueError):
        microseconds, period = _read(_GROUPS / "cpu" / "cpu.cfs_quota_us"), _read(_GROUPS / "cpu" / "cpu.cfs_period_us")
        if int(microseconds) > 0:
            yield int(microseconds) / int(period)


def _folders() -> list[Path]:
    """List the folders of this process's control group and its parents; a container sees its own group as the root."""
    with suppress(OSError):
        for line in _read(_OWN_GROUP).splitlines():
            if line.startswith("0::/"):  # version 2
                own = _GROUPS / line.removeprefix("0::/")
                return [own, *(parent for parent in own.parents if parent.is_relative_to(_GROUPS))]
    return [_GROUPS]


def _read(path: Path) -> str:
    return path.read_text(encoding="ascii")
