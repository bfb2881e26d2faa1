"""Slots in shared memory: the decoder writes pixels where Triton reads them.

Nothing here knows what the bytes are, or who else maps them.
"""

import fcntl
import mmap
import os
import re
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

SHM = Path("/dev/shm")  # noqa: S108 - the one place where POSIX shared memory is
_PAGE = mmap.PAGESIZE
_NAME = re.compile(r"nereid-[0-9]+-[0-9a-f]{8}")


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
    """A file in /dev/shm, cut into slots of one size. It is locked as long as this process lives."""

    def __init__(self, slot_bytes: int, slots: int) -> None:
        """Reserve the memory for good.

        Raises:
            OSError: There is no room, or no /dev/shm. Were the space not reserved, the first write would be a SIGBUS.
        """
        stride = -(-slot_bytes // _PAGE) * _PAGE
        self.nbytes = stride * slots
        self.is_refused = False
        """Whether Triton was asked to map it again, and would not."""
        self.name, self._descriptor = _created()
        try:
            os.posix_fallocate(self._descriptor, 0, self.nbytes)
            self.memory = mmap.mmap(self._descriptor, self.nbytes)
        except OSError:
            self.close()
            raise
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
        (SHM / self.name).unlink(missing_ok=True)
        os.close(self._descriptor)


def sweep() -> list[str]:
    """Remove the arenas of processes that are gone, whichever container they lived in; their names.

    The kernel unlocks a file when the last process that opened it has ended.
    """
    swept = []
    for path in SHM.iterdir() if SHM.is_dir() else ():
        if not _NAME.fullmatch(path.name) or not path.is_file() or path.is_symlink():
            continue
        with suppress(OSError):  # locked by the living, another user's, or gone meanwhile
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                swept.append(path.name)
            finally:
                os.close(descriptor)
    return swept


def _created() -> tuple[str, int]:
    """Create and lock a file; its name and descriptor."""
    while True:
        name = f"nereid-{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = os.open(SHM / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return name, descriptor
        os.close(descriptor)  # swept in the moment before it was locked
