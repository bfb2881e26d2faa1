"""Slots in shared memory: the decoder writes pixels where Triton reads them.

Nothing here knows what the bytes are, or who else maps them.
"""

import mmap
import os
import secrets
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SHM = Path("/dev/shm")  # noqa: S108 - the one place where POSIX shared memory is
_PAGE = mmap.PAGESIZE


class Slot(NamedTuple):
    """A piece of an arena, held by one request until nobody reads it any more."""

    arena: "Arena"
    offset: int
    """Bytes from the start of the arena."""

    def array(self, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """View it as an array, which must fit."""
        return np.ndarray(shape, dtype, self.arena.memory, self.offset)

    def free(self) -> None:
        """Give it back; from any thread."""
        self.arena.free_offsets.append(self.offset)


class Arena:
    """A file in /dev/shm, cut into slots of one size."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        """Reserve the memory for good.

        Raises:
            OSError: There is no room, or no /dev/shm. Were the space not reserved, the first write would be a SIGBUS.
        """
        self.name = f"{_owner()}-{secrets.token_hex(4)}"
        stride = -(-slot_bytes // _PAGE) * _PAGE
        self.nbytes = stride * slots
        self._path = SHM / self.name
        descriptor = os.open(self._path, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        try:
            os.posix_fallocate(descriptor, 0, self.nbytes)
            self.memory = mmap.mmap(descriptor, self.nbytes)
        except OSError:
            self._path.unlink()
            raise
        finally:
            os.close(descriptor)
        # A stack, so that few clients touch few pages.
        self.free_offsets = [stride * index for index in reversed(range(slots))]

    def take(self) -> Slot | None:
        """Take a free slot; None if there is none."""
        try:
            return Slot(self, self.free_offsets.pop())
        except IndexError:
            return None

    def close(self) -> None:
        """Remove the file. The memory itself goes when the last array on it does."""
        self._path.unlink(missing_ok=True)


def sweep() -> list[str]:
    """Remove the arenas of processes that were killed; their names."""
    swept = []
    namespace = _namespace()
    for path in SHM.glob(f"nereid-{namespace}-*-*-*"):
        _, _, pid, start, _ = path.name.split("-")
        if _start(pid) != start:
            path.unlink(missing_ok=True)
            swept.append(path.name)
    return swept


def _owner() -> str:
    """Name this process so that no other one, dead or alive, has the same name."""
    return f"nereid-{_namespace()}-{os.getpid()}-{_start('self')}"


def _namespace() -> int:
    """Identify the container: process ids mean nothing outside of it."""
    return Path("/proc/self/ns/pid").stat().st_ino


def _start(pid: str) -> str | None:
    """When a process started, in clock ticks since boot; None if it is gone, or only waits to be buried."""
    try:
        fields = Path("/proc", pid, "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in {"Z", "X"} else fields[19]
