"""Arenas in shared memory and their slots: the decoder writes pixels where Triton reads them."""

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
"""Maximum number of full-size slots in an arena. If all are in use, further tensors are sent inline."""
MAX_ARENA_BYTES = 128 << 20
MAX_WORKER_BYTES = 256 << 20
SHM = Path("/dev/shm")  # noqa: S108 - the only place of POSIX shared memory
_NAME = re.compile(r"nereid-[0-9]+-[0-9a-f]{8}")


def arena_bytes(slot_bytes: int) -> int:
    """Return the size of an arena for tensors of this size; 0 if a single tensor is too large."""
    return min(SLOTS, MAX_ARENA_BYTES // slot_bytes) * slot_bytes


class Slot(NamedTuple):
    """A part of an arena, lent to one request at a time."""

    arena: "Arena"
    offset: int
    """Bytes from the start of the arena."""
    end: int
    """End of the slot, where the next one may begin; bytes from the start of the arena."""

    def array(self, shape: tuple[int, ...], dtype: type[np.generic]) -> NDArray[Any]:
        """Return a view of the slot as an array, which must not be larger than the slot."""
        return np.ndarray(shape, dtype, self.arena.memory, self.offset)


class Arena:
    """A file in /dev/shm, divided into slots. The file is locked while this process lives."""

    def __init__(self, nbytes: int) -> None:
        """Create the file and reserve its memory, or raise OSError: a write to a full /dev/shm would raise SIGBUS."""
        self.nbytes = nbytes
        self.name, self._descriptor = _create()
        self.region = f"{self.name}-{secrets.token_hex(16)}"
        """Name of the region, a secret: any client that knew it could let Triton read and write the slots of all requests."""
        try:
            os.posix_fallocate(self._descriptor, 0, self.nbytes)
            self.memory = mmap.mmap(self._descriptor, self.nbytes)
        except OSError:
            self.close()
            raise
        self.used_at = monotonic()
        """When `take` was last called, on the `time.monotonic` clock."""
        self._ring = Ring(nbytes)
        self._is_retired = False
        self._lock = Lock()

    @property
    def lent_bytes(self) -> int:
        """Total size of the lent slots."""
        return self._ring.lent_bytes

    def take(self, nbytes: int) -> Slot | None:
        """Take a slot, directly after the previous one if possible; None if there is no room. May be called from any thread."""
        self.used_at = monotonic()
        with self._lock:
            offset = None if self._is_retired else self._ring.take(nbytes)
        return None if offset is None else Slot(self, offset, offset + nbytes)

    def give_back(self, slot: Slot) -> None:
        """Take a slot back when nothing reads or writes it any more. May be called from any thread."""
        with self._lock:
            self._ring.give_back(slot.offset, slot.end)

    def retire(self, *, only_unused: bool = False) -> bool:
        """Lend no more slots, or only if none is lent now; return whether none is lent."""
        with self._lock:
            is_unused = not self._ring.lent_bytes
            self._is_retired |= is_unused or not only_unused
            return is_unused

    def close(self) -> None:
        """Remove the file. The memory is freed with the last array that uses it."""
        (SHM / self.name).unlink(missing_ok=True)
        os.close(self._descriptor)


def sweep() -> list[str]:
    """Remove the arenas of ended processes, also of other containers, and return their names."""
    swept = []
    for path in SHM.iterdir() if SHM.is_dir() else ():
        if not _NAME.fullmatch(path.name) or not path.is_file() or path.is_symlink():
            continue
        with suppress(OSError):  # locked by a living process, owned by another user, or removed meanwhile
            descriptor = os.open(path, os.O_RDONLY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
                swept.append(path.name)
            finally:
                os.close(descriptor)
    return swept


def room() -> int | None:
    """Return the maximum total size of all arenas of this host in bytes, including existing ones; None without /dev/shm."""
    if not SHM.is_dir():
        return None
    nbytes = shutil.disk_usage(SHM).free
    for path in SHM.iterdir():
        with suppress(OSError):  # removed meanwhile, or a link of another user
            nbytes += path.stat().st_size if _NAME.fullmatch(path.name) else 0
    return nbytes


def is_removed(name: str) -> bool:
    """Return whether a file has the name of an arena, and does not exist."""
    return _NAME.fullmatch(name) is not None and not (SHM / name).exists()


def _create() -> tuple[str, int]:
    while True:
        name = f"nereid-{os.getpid()}-{secrets.token_hex(4)}"
        descriptor = os.open(SHM / name, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        if os.fstat(descriptor).st_nlink:
            return name, descriptor
        os.close(descriptor)  # another process swept it before it was locked
