"""Results in the memory of the host, for all of its workers.

The memory file, which the first parent process creates and all workers inherit, contains the secret of the host, an index and a
ring of records. A writer locks it for microseconds; if it is killed, the lock is released, and nothing refers to what it has not
finished. Readers do not lock: what is overwritten meanwhile fails the check of its reader.
"""

import fcntl
import mmap
import os
import struct
from hashlib import blake2b
from pathlib import Path
from time import monotonic

from app.telemetry.metrics import Metrics

_SECRET_BYTES, _MIN_SECRET_BYTES = 64, 32
_VARIABLE = "NEREID_INTERNAL_CACHE_FD"
_HEADER_BYTES = 4096
# Cells of the header: positions of the next record and of the oldest one, which count all bytes ever written.
_HEAD, _TAIL = 8, 9
_CELL_BYTES = 8
# The index has sets of slots; a slot is four cells: a part of the key, position, length of the value (0: free), its end in ms.
_WAYS, _SLOT_CELLS = 8, 4
_SET_CELLS = _WAYS * _SLOT_CELLS
# A record starts with its size and the cell of its slot, and is a multiple of this. Most values have some hundred bytes.
_RECORD_BYTES, _USUAL_BYTES = 16, 512
_FILLER = 0  # in place of the slot's cell: the record only fills the end of the ring
_ATTEMPTS = 100


def create(nbytes: int) -> int:
    """Create the memory file for this process and its children, unless the process has inherited one.

    `nbytes` is the room for results, 0 if only the secret is needed. The descriptor is returned, which must be passed on to other
    programs.
    """
    if not os.environ.get(_VARIABLE):
        descriptor = _create_file(nbytes)
        os.set_inheritable(descriptor, True)  # noqa: FBT003
        os.environ[_VARIABLE] = str(descriptor)
    return int(os.environ[_VARIABLE])


def open_file(nbytes: int) -> int:
    """Open the host's memory file, or a new one if this process has not inherited any; return its descriptor."""
    inherited = os.environ.get(_VARIABLE)
    # Locks belong to an open file. With the inherited descriptor, all workers would share one.
    return os.open(f"/proc/self/fd/{inherited}", os.O_RDWR) if inherited else _create_file(nbytes)


def read_secret(descriptor: int) -> bytes:
    """Return the secret in a memory file."""
    return os.pread(descriptor, _SECRET_BYTES, 0)


def read_secret_of(path: str) -> bytes:
    """Return the secret in a file of the settings.

    Raises:
        ValueError: The file cannot be read, or is too short.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ValueError(f"{path}: {error.strerror}") from error
    if len(content) < _MIN_SECRET_BYTES:
        raise ValueError(f"{path} has {len(content)} bytes, and needs at least {_MIN_SECRET_BYTES}")
    return blake2b(content, digest_size=_SECRET_BYTES).digest()


class MemoryStore:
    """A store in the memory file. The oldest values leave first."""

    def __init__(self, descriptor: int, seconds: float, metrics: Metrics) -> None:
        """Use a memory file with room, whose values last so many seconds. The store closes it."""
        self._descriptor, self._seconds, self._metrics = descriptor, seconds, metrics
        self._memory = mmap.mmap(descriptor, 0)
        self._cells = memoryview(self._memory).cast("Q")
        room = len(self._memory) - _HEADER_BYTES
        self._sets = max(1, room // (_SET_CELLS * _CELL_BYTES + _WAYS * _USUAL_BYTES))
        self._ring = _HEADER_BYTES + self._sets * _SET_CELLS * _CELL_BYTES
        self._size = (len(self._memory) - self._ring) // _RECORD_BYTES * _RECORD_BYTES

    async def get(self, key: bytes) -> bytes | None:
        """Return a value that has not ended yet."""
        tag, slots = self._find_set(key)
        for slot in slots:
            own, position, length, until = self._cells[slot : slot + _SLOT_CELLS]
            if own == tag and length and monotonic() * 1e3 < until:
                begin = self._ring + position % self._size + _RECORD_BYTES
                return self._memory[begin : begin + length]
        return None

    async def put(self, key: bytes, value: bytes) -> None:
        """Write a value, unless it does not fit or another process, which may be suspended, holds the lock."""
        nbytes = -(-(_RECORD_BYTES + len(value)) // _RECORD_BYTES) * _RECORD_BYTES
        if nbytes > self._size or not self._lock():
            return
        try:
            rest = self._size - self._cells[_HEAD] % self._size
            if nbytes > rest:
                self._write(rest, _FILLER, b"")
            tag, slots = self._find_set(key)
            self._make_room(nbytes)
            slot = min(slots, key=lambda slot: self._age(slot, tag))
            self._metrics.cache_evictions.add(self._is_used(slot) and self._cells[slot] != tag)
            position, cells = self._cells[_HEAD], self._cells
            cells[slot + 2] = 0  # nobody may find the new record with the old length, even if this process is killed now
            self._write(nbytes, slot, value)
            cells[slot], cells[slot + 1], cells[slot + 3] = tag, position, int((monotonic() + self._seconds) * 1e3)
            cells[slot + 2] = len(value)
            self._metrics.cache_bytes.set(cells[_HEAD] - cells[_TAIL])
        finally:
            self._control(fcntl.F_UNLCK)

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

    def _age(self, slot: int, tag: int) -> tuple[bool, bool, int]:
        """Return the order in which slots are used for a key: its own, free ones, the oldest."""
        return self._cells[slot] != tag, self._is_used(slot), self._cells[slot + 1]

    def _is_used(self, slot: int) -> bool:
        return self._cells[slot + 2] > 0 and monotonic() * 1e3 < self._cells[slot + 3]

    def _make_room(self, nbytes: int) -> None:
        """Remove the oldest records until a new one overwrites none of them."""
        cells = self._cells
        while (tail := cells[_TAIL]) + self._size < cells[_HEAD] + nbytes:
            first = (self._ring + tail % self._size) // _CELL_BYTES
            old_bytes, slot = cells[first], cells[first + 1]
            if slot != _FILLER and cells[slot + 1] == tail:
                self._metrics.cache_evictions.add(self._is_used(slot))
                cells[slot + 2] = 0
            cells[_TAIL] = tail + old_bytes

    def _write(self, nbytes: int, slot: int, value: bytes) -> None:
        """Append a record, which nobody sees before the head has moved."""
        self._make_room(nbytes)
        begin = self._ring + self._cells[_HEAD] % self._size
        self._memory[begin : begin + _RECORD_BYTES + len(value)] = struct.pack("QQ", nbytes, slot) + value
        self._cells[_HEAD] += nbytes

    def _lock(self) -> bool:
        for _ in range(_ATTEMPTS):
            try:
                self._control(fcntl.F_WRLCK)
            except BlockingIOError:
                os.sched_yield()
            else:
                return True
        return False

    def _control(self, kind: int) -> None:
        fcntl.fcntl(self._descriptor, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", kind, os.SEEK_SET, 0, 1, 0))


def _create_file(nbytes: int) -> int:
    descriptor = os.memfd_create("nereid-cache")
    os.truncate(descriptor, max(nbytes, _HEADER_BYTES))
    os.pwrite(descriptor, os.urandom(_SECRET_BYTES), 0)
    return descriptor
