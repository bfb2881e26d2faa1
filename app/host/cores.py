"""Available cores, and the CPU usage of this process."""

import math
import os
import time
from itertools import chain
from pathlib import Path

from app.host import cgroup, memory

_OWN_STATE = Path("/proc/self/stat")
_STARTED_FIELD = 19  # after the name, which may contain spaces


def available() -> float:
    """Return the number of cores: the minimum of the CPU affinity and the CPU quotas of the control groups."""
    quotas = chain(cgroup.limits("cpu", "cpu.max"), cgroup.limits("cpu", "cpu.cfs_quota_us", "cpu.cfs_period_us"))
    return min([float(len(os.sched_getaffinity(0))), *(quota / period for quota, period in quotas if quota > 0)])


def workers(asked: int, instances: int) -> int:
    """Return the number of API processes per instance; `asked` 0 means one per core if they fit, divided among the instances."""
    return asked or max(1, min(math.floor(available()), memory.workers_that_fit()) // max(1, instances))


def workers_of_host(asked: int, instances: int) -> int:
    """Return the number of API processes of all instances."""
    return max(1, instances) * workers(asked, instances)


def used_percent() -> float:
    """Return the CPU usage of this process since its start, in percent of one core."""
    started = int(_OWN_STATE.read_text(encoding="ascii").rpartition(")")[2].split()[_STARTED_FIELD]) / os.sysconf("SC_CLK_TCK")
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started
    return 100 * time.process_time() / max(age, 0.1)
