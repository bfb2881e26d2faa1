"""Available memory, and the memory of this process."""

import os
from contextlib import suppress
from pathlib import Path

_CGROUP_LIMITS = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes")


def available_bytes() -> int:
    """Return the memory of the host, or of the container if that is less."""
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = []
    for path in _CGROUP_LIMITS:
        with suppress(OSError, ValueError):  # not there, or "max"
            limits.append(int(path.read_text(encoding="ascii")))
    return min([host, *limits])


def image_budget(mebibytes: int, largest: int) -> int:
    """Return the memory budget for the images of all requests, in bytes.

    Args:
        mebibytes: The configured budget in MiB; 0 for an eighth of the available memory.
        largest: Memory for the largest image in bytes, the minimum of the budget.
    """
    return max(mebibytes * 2**20 or available_bytes() // 8, largest)


def resident_bytes() -> int:
    """Return the resident memory of this process."""
    return int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
