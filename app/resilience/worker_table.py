"""Counters that all workers of a host share: each worker writes its own row and reads all rows; all write the last one.

The table is a memory file that the first parent process creates and all workers inherit. A worker locks its row while it lives, so
the row of a killed worker is ignored after a refresh, and another worker may take it. The new worker continues the old values in
counter columns; all other columns start at zero.

Metrics cannot take all columns: some are left to what decides on requests. A column keeps its key, so that workers may remember it;
names that come and go, such as the addresses of Tritons, have aliases in keys.
"""

import fcntl
import math
import mmap
import os
import struct
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from threading import Lock
from time import monotonic

from app.resilience import memory_file

_ROWS = 512
_COLUMNS = 16384  # unused columns take no memory
_CELL_BYTES = 8  # aligned, so reads are atomic
_CELLS_SIZE = _ROWS * _COLUMNS * _CELL_BYTES
# The keys of the columns follow the cells. The first row contains their lengths; its last cell contains the number of workers ever
# started and, in the lower bits, the highest row used.
_KEYS = 0
_KEY_BYTES = 384  # Triton's model names have up to 255
# The names of the aliases follow the keys. The first alias has no name: all names share it that find no other one. Published bytes,
# of any number, follow the names.
_ALIASES = 256
_NAMES = _CELLS_SIZE + _COLUMNS * _KEY_BYTES
_SIZE = _NAMES + _ALIASES * _KEY_BYTES
_LAST = _COLUMNS - 1
NO_COLUMN = _LAST
"""The column of keys that have none of their own."""
# Columns that metrics cannot take, and twice as many that callers cannot.
_RESERVED = 4096
COUNTER, GAUGE, CALLER = "counter ", "gauge ", "caller "
"""Prefixes of the keys of metrics and of callers. Counters are never reset."""
SEPARATOR = "\x1f"
"""Between the parts of such keys."""
# How long metrics can still be read under a name that no worker uses any more.
_KEEP_NAME_SECONDS = 600
_VARIABLE = "NEREID_INTERNAL_WORKER_TABLE_FD"
_PROCESS, _BEATS, _FOLLOWER = "process", "beats", "follower"


def create() -> int:
    """Create the table of this host, as `memory_file.share` does."""
    return memory_file.share(_VARIABLE, _create_file)


class TableView:
    """A view of all rows. Columns are found by key."""

    def __init__(self) -> None:
        self._descriptor = memory_file.reopen(_VARIABLE, _create_file)
        self._memory = mmap.mmap(self._descriptor, _SIZE)
        self._cells = memoryview(self._memory).cast("q")
        self._columns: dict[str, int] = {}
        """Columns by key: the keys that this process knows, and keys that share the last column."""
        self._finding = Lock()
        self._known = 0
        """Number of columns whose keys have been read."""

    def column(self, key: str) -> int:
        """Return the column of a key, the same in all workers; `NO_COLUMN` if it is too long or none is free. Thread-safe."""
        if key not in self._columns:
            if self._memory.closed:
                return _LAST
            with self._locked():
                self._columns[key] = self._find_column(key)
        return self._columns[key]

    def keys(self, kind: str) -> list[str]:
        """List the keys with the prefix `COUNTER` or `GAUGE` that any worker has used, without this prefix."""
        with self._finding:
            self._learn()
            return [key.removeprefix(kind) for key, column in self._columns.items() if key.startswith(kind) and column != _LAST]

    def try_lock(self) -> bool:
        """Lock what only one process of the host may do at a time, until `unlock` or its end; False if another one does it."""
        return self._lock(_ROWS)

    def unlock(self) -> None:
        """Let other processes do it."""
        self._control(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _ROWS)

    def total_ever(self, column: int) -> int:
        """Return the sum over all workers ever started."""
        return sum(self._cells[row * _COLUMNS + column] for row in range(_KEYS + 1, self._cells[_LAST] % _ROWS + 1))

    def beats(self) -> dict[int, int]:
        """Return how often each living worker has called `WorkerTable.beat`, by process id."""
        process, beats = self.column(_PROCESS), self.column(_BEATS)
        rows = [row * _COLUMNS for row in range(_KEYS + 1, _ROWS) if self._is_locked(row)]
        return {self._cells[row + process]: self._cells[row + beats] for row in rows}

    def publish(self, data: bytes) -> None:
        """Replace what `published` returns in all processes."""
        with self._locked():
            os.truncate(self._descriptor, _SIZE)  # if this process is killed now, others get too few bytes, but no mixture
            os.pwrite(self._descriptor, data, _SIZE)

    def published(self) -> bytes:
        """Return what a process has published last, or the beginning of it if the process was killed meanwhile."""
        with self._locked():
            return os.pread(self._descriptor, os.fstat(self._descriptor).st_size - _SIZE, _SIZE)

    def close(self) -> None:
        """Close the view."""
        self._cells = memoryview(bytearray(_COLUMNS * _CELL_BYTES)).cast("q")
        self._memory.close()
        os.close(self._descriptor)

    def _learn(self) -> None:
        while self._known < _LAST and (length := self._cells[self._known]):
            start = _CELLS_SIZE + self._known * _KEY_BYTES
            self._columns[self._memory[start : start + length].decode()] = self._known
            self._known += 1

    def _find_column(self, key: str) -> int:
        self._learn()
        if key in self._columns:
            return self._columns[key]
        encoded = key.encode()
        free = _LAST - self._known - _RESERVED * (key.startswith((COUNTER, GAUGE)) + 2 * key.startswith(CALLER))
        if free <= 0 or len(encoded) > _KEY_BYTES:
            return _LAST
        start = _CELLS_SIZE + self._known * _KEY_BYTES
        self._memory[start : start + len(encoded)] = encoded
        self._cells[self._known] = len(encoded)  # last, because readers do not lock
        self._known += 1
        return self._known - 1

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with self._finding:
            while not self._lock(_KEYS):  # held for microseconds
                os.sched_yield()
            try:
                yield
            finally:
                self._control(fcntl.F_OFD_SETLK, fcntl.F_UNLCK, _KEYS)

    def _lock(self, row: int) -> bool:
        with suppress(BlockingIOError):
            self._control(fcntl.F_OFD_SETLK, fcntl.F_WRLCK, row)
            return True
        return False

    def _is_locked(self, row: int) -> bool:
        return self._control(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, row) != fcntl.F_UNLCK

    def _control(self, command: int, kind: int, row: int) -> int:
        """Call fcntl with a `struct flock` for one row, and return the resulting lock type."""
        answer = fcntl.fcntl(self._descriptor, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, row, 1, 0))
        return int(struct.unpack_from("h", answer)[0])


class WorkerTable(TableView):
    """One row of the table, and a view of all rows of living workers."""

    def __init__(self, *, is_follower: bool = False) -> None:
        """Take a free row of the host's table. A follower, which searches for workers, is never the first, and counts as none."""
        super().__init__()
        self._row = next((row for row in range(_KEYS + 1, _ROWS - 1) if self._lock(row)), -1)
        if self._row < 0:
            raise OSError("there are more workers than rows in their table")
        self._own = self._row * _COLUMNS
        self.cells = self._cells[self._own : self._own + _COLUMNS]
        """This worker's cells, by column."""
        self.shared = self._cells[(_ROWS - 1) * _COLUMNS : _ROWS * _COLUMNS]
        """The last row, which is no worker's: cells that all of them write."""
        self._aliases: dict[str, int] = {}
        """Number of the alias of each name that this worker uses."""
        with self._locked():
            self._learn()
            for key, column in self._columns.items():
                if not key.startswith(COUNTER):
                    self.set(column, 0)
            self.set(_LAST, 0)
            self._columns[_FOLLOWER] = self._find_column(_FOLLOWER)
            self.set(self._columns[_FOLLOWER], is_follower)
            workers, highest = divmod(self._cells[_LAST], _ROWS)
            self._cells[_LAST] = (workers + 1) * _ROWS + max(highest, self._row)
        self.refresh()

    def beat(self) -> None:
        """Record that this worker's event loop runs. Call this about once a second."""
        self.set(self.column(_PROCESS), os.getpid())
        self.add(self.column(_BEATS), 1)

    def add(self, column: int, value: int) -> None:
        """Add to this worker's cell. Not thread-safe."""
        self.cells[column] += value

    def set(self, column: int, value: int) -> None:
        """Set this worker's cell."""
        self.cells[column] = value

    def alias(self, name: str) -> str:
        """Return what stands for a name in keys, the same in all workers; it is the name's at least until `keep_aliases`.

        An alias whose name no worker uses any more gets another name later, and all its columns start at zero.
        """
        if self._memory.closed:
            return _mark(0)
        if name not in self._aliases:
            users = [self.column(f"users of alias {number}") for number in range(_ALIASES)]
            self.refresh()
            with self._locked():
                number = self._aliases[name] = self._find_alias(name, users)
                self.set(users[number], 1)
        return _mark(self._aliases[name])

    def aliases(self) -> dict[str, str]:
        """Return the names by alias."""
        with self._locked():
            return {_mark(number): name for number, name in enumerate(self._names())}

    def keep_aliases(self, names: Collection[str], kind: str = "") -> None:
        """Stop using all other names of a kind: those that begin with it and a separator, by default those without separators."""
        for name in self._aliases.keys() - names:
            if not (name.startswith(kind + SEPARATOR) if kind else SEPARATOR not in name):
                continue
            self.set(self.column(f"users of alias {self._aliases.pop(name)}"), -round(monotonic()))

    def values(self, *columns: int) -> list[int]:
        """Return the cells of all living workers, including this one, column by column."""
        cells = self._cells
        if cells[_LAST] > self._seen:  # a worker has started
            self.refresh()
        return [cells[row + column] for column in columns for row in self._living]

    def rows(self) -> list[int]:
        """Return the row numbers of all living workers, in the order of `values`."""
        return [row // _COLUMNS for row in self._living]

    def total(self, column: int) -> int:
        """Return the sum over all living workers."""
        cells = self._cells
        if cells[_LAST] > self._seen:  # a worker has started
            self.refresh()
        total = 0
        for row in self._living:  # a hot path: called several times per request
            total += cells[row + column]
        return total

    @property
    def is_first(self) -> bool:
        """Whether this worker has the lowest row of all living ones but followers, as of the last `refresh`."""
        return self._first == self._own

    def follower_beat(self) -> int:
        """Return how often the living followers have called `beat`, as of the last `refresh`; 0 if there are none."""
        follower, beats = self.column(_FOLLOWER), self.column(_BEATS)
        return sum(self._cells[row + beats] for row in self._living if self._cells[row + follower])

    def refresh(self) -> None:
        """Find the living workers. Call this about once a second, to notice killed workers."""
        self._seen = self._cells[_LAST]
        rows = range(_KEYS + 1, self._seen % _ROWS + 1)
        self._living = [row * _COLUMNS for row in rows if row == self._row or self._is_locked(row)]
        follower = self.column(_FOLLOWER)
        workers = [row for row in self._living if not self._cells[row + follower]]
        self._first = next(iter(workers), -1)
        self.workers = len(workers) or 1
        """Number of living workers, without followers; at least 1."""

    def close(self) -> None:
        """Release the row. Later changes have no effect."""
        released, self.cells = self.cells, memoryview(bytearray(_COLUMNS * _CELL_BYTES)).cast("q")  # a thread may still count
        self.shared = self.cells
        released.release()
        super().close()
        self._own, self._living, self._first, self.workers, self._cells = 0, [0], 0, 1, self.cells

    def _find_alias(self, name: str, users: list[int]) -> int:
        """Return the number of a name's alias: its own; else one without users, if possible not one that had some lately.

        `users` are the columns that are positive while a worker uses the alias, and then minus the time when it stopped.
        """
        names = self._names()
        if name in names:
            return names.index(name)
        cells = [self.values(column) for column in users]
        left_at = {n: -min(cells[n]) if names[n] else -math.inf for n in range(1, _ALIASES) if max(cells[n]) <= 0}
        lately = monotonic() - _KEEP_NAME_SECONDS
        found = min(left_at, key=lambda n: (left_at[n] > lately, not names[n], left_at[n]), default=0)
        if found:
            self._learn()
            for column in [column for key, column in self._columns.items() if _mark(found) in key]:
                for row in range(_KEYS + 1, self._cells[_LAST] % _ROWS + 1):
                    self._cells[row * _COLUMNS + column] = 0
            start = _NAMES + found * _KEY_BYTES
            self._memory[start : start + _KEY_BYTES] = name.encode()[:_KEY_BYTES].ljust(_KEY_BYTES, b"\0")
        return found

    def _names(self) -> list[str]:
        starts = range(_NAMES, _SIZE, _KEY_BYTES)
        return [self._memory[start : start + _KEY_BYTES].rstrip(b"\0").decode() for start in starts]


def _mark(number: int) -> str:
    """Return an alias; it contains characters that no other part of a key has."""
    return f"\x1e{number}\x1e"


def _create_file() -> int:
    """Create an empty table in memory; return its descriptor."""
    descriptor = os.memfd_create("nereid-workers")
    os.truncate(descriptor, _SIZE)
    return descriptor
