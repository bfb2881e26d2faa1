"""Results in the memory of the host, for all of its workers.

The memory file, which the first parent process creates and all workers inherit, contains the secret of the host, an index and a
ring of values. A writer locks it for microseconds; if it is killed, the lock is released, and the index does not refer to what it
has not finished. Readers do not lock, and nothing relies on what the file contains: a value that is overwritten while it is read,
or a file that a program with another layout has written, fails the check of the reader.
"""

import fcntl
import mmap
import os
import struct
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from pathlib import Path
from time import monotonic

from app.features.cache.instruments import Instruments
from app.resilience import last_valid, memory_file

_SECRET_BYTES, _MIN_SECRET_BYTES = 64, 32
_VARIABLE = "NEREID_INTERNAL_CACHE_FD"
_HEADER_BYTES = 4096
# Cell of the header: the position of the next value. Positions count all bytes ever written to the ring.
_HEAD = 8
_CELL_BYTES = 8
# The index has sets of slots; a slot is four cells: a part of the key, position, length of the value (0: free), its end in ms.
_WAYS, _SLOT_CELLS = 8, 4
_SET_CELLS = _WAYS * _SLOT_CELLS
# Most values have some hundred bytes.
_USUAL_BYTES = 512
_ATTEMPTS = 100
_MAX_POSITION = 1 << 63


def create(nbytes: int) -> int:
    """Create the memory file, as `memory_file.share` does; with room for results, or 0 if only the secret is needed."""
    return memory_file.share(_VARIABLE, partial(_create_file, nbytes))


def open_file(nbytes: int) -> int:
    """Open the host's memory file, or a new one if this process has not inherited any; return its descriptor."""
    return memory_file.reopen(_VARIABLE, partial(_create_file, nbytes))


def read_secret(descriptor: int) -> bytes:
    """Return the secret in a memory file."""
    return os.pread(descriptor, _SECRET_BYTES, 0)


def read_secret_of(path: str) -> bytes:
    """Return the secret in a file of the settings, as it was when it was last valid; raises ValueError if it never was."""
    return last_valid.load("cache_key", path, lambda: _read_secret(path), bytes, ValueError)


def _read_secret(path: str) -> bytes:
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    if len(content) < _MIN_SECRET_BYTES:
        raise ValueError(f"{path} has {len(content)} bytes, and needs at least {_MIN_SECRET_BYTES}")
    return blake2b(content, digest_size=_SECRET_BYTES).digest()


class MemoryStore:
    """A store in the memory file. The oldest values leave first."""

    def __init__(self, descriptor: int, seconds: float, metrics: Instruments) -> None:
        """Use a memory file with room, whose values last so many seconds. The store closes it."""
        self._descriptor, self._seconds, self._metrics = descriptor, seconds, metrics
        self._memory = mmap.mmap(descriptor, 0)
        self._cells = memoryview(self._memory).cast("Q")
        room = len(self._memory) - _HEADER_BYTES
        self._sets = max(1, room // (_SET_CELLS * _CELL_BYTES + _WAYS * _USUAL_BYTES))
        self._ring = _HEADER_BYTES + self._sets * _SET_CELLS * _CELL_BYTES
        self._size = len(self._memory) - self._ring

    async def get(self, key: bytes) -> bytes | None:
        """Return a value that has not ended yet."""
        tag, slots = self._find_set(key)
        for slot in slots:
            own, position, length, _ = self._cells[slot : slot + _SLOT_CELLS]
            if own == tag and self._lasts(slot) and self._is_there(slot):
                begin = self._ring + position % self._size
                return self._memory[begin : begin + length]
        return None

    async def put(self, key: bytes, value: bytes) -> None:
        """Write a value, unless it does not fit or another process, which may be suspended, holds the lock."""
        if len(value) > self._size or not self._lock():
            return
        try:
            cells, (tag, slots) = self._cells, self._find_set(key)
            slot = min(slots, key=lambda slot: (cells[slot] != tag, self._lasts(slot) and self._is_there(slot), cells[slot + 1]))
            self._metrics.evictions.add(self._lasts(slot) and cells[slot] != tag)
            position = cells[_HEAD] % _MAX_POSITION
            if len(value) > (rest := self._size - position % self._size):
                position += rest  # a value is in one piece
            cells[slot + 2] = 0  # nobody may find the new value with the old length, even if this process is killed now
            cells[_HEAD] = position + len(value)  # before they are overwritten, others are not found any more
            begin = self._ring + position % self._size
            self._memory[begin : begin + len(value)] = value
            cells[slot], cells[slot + 1], cells[slot + 3] = tag, position, int((monotonic() + self._seconds) * 1e3)
            cells[slot + 2] = len(value)
            self._metrics.bytes.set(min(cells[_HEAD], self._size))
        finally:
            fcntl.flock(self._descriptor, fcntl.LOCK_UN)

    async def close(self) -> None:
        """Close the file."""
        self._cells.release()
        self._memory.close()
        os.close(self._descriptor)

    def _find_set(self, key: bytes) -> tuple[int, range]:
        """Return the part of a key that its slot has, and the first cells of the slots that it may have."""
        tag, number = struct.unpack_from("QQ", key)
        first = (_HEADER_BYTES // _CELL_BYTES) + number % self._sets * _SET_CELLS
        return tag, range(first, first + _SET_CELLS, _SLOT_CELLS)

    def _lasts(self, slot: int) -> bool:
        return self._cells[slot + 2] > 0 and monotonic() * 1e3 < self._cells[slot + 3]

    def _is_there(self, slot: int) -> bool:
        return self._cells[_HEAD] <= self._cells[slot + 1] + self._size

    def _lock(self) -> bool:
        for _ in range(_ATTEMPTS):
            with suppress(BlockingIOError):
                fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return True
            os.sched_yield()
        return False


def _create_file(nbytes: int) -> int:
    descriptor = os.memfd_create("nereid-cache")
    os.truncate(descriptor, max(nbytes, _HEADER_BYTES))
    os.pwrite(descriptor, os.urandom(_SECRET_BYTES), 0)
    return descriptor
