"""Available memory, and the memory of this process."""

import os
from itertools import chain
from pathlib import Path

from app.host import cgroup

WORKER_BYTES = 140 << 20
"""Resident memory of a worker after many requests, without images in progress: `bench versus --contests memory`."""


def available_bytes() -> int:
    """Return the memory of the host, or the limit of a control group around this process if that is less."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = chain(cgroup.limits("memory", "memory.max"), cgroup.limits("memory", "memory.limit_in_bytes"))
    return min([host, *(limit for (limit,) in limits)])


def workers_that_fit() -> int:
    """Return how many workers a quarter of the memory is enough for; the rest is for images and bodies. At least one."""
    return max(1, available_bytes() // 4 // WORKER_BYTES)


def fraction_that_fits(largest: int, workers: int) -> float:
    """Return the part, at most 1, of a request with `largest` bytes that has room beside the workers and their parent."""
    room = available_bytes() - (workers + 1) * WORKER_BYTES
    return min(1.0, max(room, WORKER_BYTES) / largest)


def image_budget(mebibytes: int, largest: int) -> int:
    """Return the memory budget for all images in bytes: `mebibytes`, or an eighth of the memory if it is 0; at least `largest`."""
    return max(mebibytes * 2**20 or available_bytes() // 8, largest)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
