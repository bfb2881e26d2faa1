"""Slots in shared memory: the decoder writes pixels where Triton reads them.

Nothing here knows what the bytes are, or which Triton maps them.
"""

import fcntl
import mmap
import os
import re
import secrets
import shutil
from contextlib import suppress
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.triton.ring import Ring

SLOTS = 32
"""Images that an arena has room for, at most. If a worker handles more at a time, the tensors of the others are sent inline."""
MAX_ARENA_BYTES = 128 << 20
MAX_WORKER_BYTES = 256 << 20
"""All arenas of a worker together."""
SHM = Path("/dev/shm")  # noqa: S108 - the one place where POSIX shared memory is
_NAME = re.compile(r"nereid-[0-9]+-[0-9a-f]{8}")


def arena_bytes(slot_bytes: int) -> int:
    """Return the size of an arena for tensors of this size; 0 if one alone is too large."""
    return min(SLOTS, MAX_ARENA_BYTES // slot_bytes) * slot_bytes


class Slot(NamedTuple):
    """A part of an arena, lent to one request at a time."""

    arena: "Arena"
    offset: int
    """Bytes from the start of the arena."""
    end: int
    """Where it ends, and the next one may begin."""

    def array(self, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """View it as an array, which must fit."""
        return np.ndarray(shape, dtype, self.arena.memory, self.offset)

    def free(self) -> None:
        """Give it back; from any thread, once nothing reads or writes it any more."""
        self.arena.give_back(self)


class Arena:
    """A file in /dev/shm, divided into slots. It stays locked while this process lives."""

    def __init__(self, nbytes: int) -> None:
        """Create the file and reserve its memory: without that, a full /dev/shm would be a SIGBUS at the first write.

        Raises:
            OSError: There is no room, or no /dev/shm.
        """
        self.nbytes = nbytes
        self.name, self._descriptor = _create()
        self.region = f"{self.name}-{secrets.token_hex(16)}"
        """Its name in Triton, a secret: whoever knew it could let Triton read and write the slots of all requests."""
        try:
            os.posix_fallocate(self._descriptor, 0, self.nbytes)
            self.memory = mmap.mmap(self._descriptor, self.nbytes)
        except OSError:
            self.close()
            raise
        self.used_at = monotonic()
        """When a slot was last asked for, as `time.monotonic` counts."""
        self._ring = Ring(nbytes)
        self._is_retired = False
        self._lock = Lock()

    @property
    def lent_bytes(self) -> int:
        """Size of the slots that are lent."""
        return self._ring.lent_bytes

    def take(self, nbytes: int) -> Slot | None:
        """Take a slot of that size, right behind the last one if possible; None if there is no room. From any thread."""
        self.used_at = monotonic()
        with self._lock:
            offset = None if self._is_retired else self._ring.take(nbytes)
        return None if offset is None else Slot(self, offset, offset + nbytes)

    def give_back(self, slot: Slot) -> None:
        """Take a slot back; from any thread."""
        with self._lock:
            self._ring.give_back(slot.offset)

    def retire(self) -> None:
        """Lend no more slots."""
        with self._lock:
            self._is_retired = True

    def retire_unused(self) -> bool:
        """Lend no more slots, if none is lent; return whether that is so."""
        with self._lock:
            self._is_retired = self._is_retired or not self._ring.lent_bytes
            return not self._ring.lent_bytes

    def close(self) -> None:
        """Remove the file. The memory itself is freed with the last array on it."""
        (SHM / self.name).unlink(missing_ok=True)
        os.close(self._descriptor)


def sweep() -> list[str]:
    """Remove the arenas of processes that have ended, in whichever container they ran, and return their names.

    The kernel unlocks a file when the last process that opened it has ended.
    """
    swept = []
    for path in SHM.iterdir() if SHM.is_dir() else ():
        if not _NAME.fullmatch(path.name) or not path.is_file() or path.is_symlink():
            continue
        with suppress(OSError):  # locked by a living process, another user's, or removed meanwhile
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                swept.append(path.name)
            finally:
                os.close(descriptor)
    return swept


def room() -> int | None:
    """Return how many bytes all arenas of this host may have, those that exist included; None if there is no /dev/shm."""
    if not SHM.is_dir():
        return None
    nbytes = shutil.disk_usage(SHM).free
    for path in SHM.iterdir():
        with suppress(FileNotFoundError):  # removed meanwhile
            nbytes += path.stat().st_size if _NAME.fullmatch(path.name) else 0
    return nbytes


def is_removed(name: str) -> bool:
    """Return whether a file was that of an arena, and is not there any more."""
    return _NAME.fullmatch(name) is not None and not (SHM / name).exists()


def _create() -> tuple[str, int]:
    """Create and lock a file; return its name and descriptor."""
    while True:
        name = f"nereid-{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = os.open(SHM / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return name, descriptor
        os.close(descriptor)  # another process swept it before it was locked
