"""Counters that all workers of a host share: each worker writes its own row and reads all rows.

The table is a memory file that the first parent process creates and all workers inherit. A worker locks its row while it lives, so
the row of a killed worker is ignored after a refresh, and another worker may take it. The new worker continues the old values in
counter columns; all other columns start at zero.
"""

import fcntl
import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_ROWS = 512
_COLUMNS = 16384  # unused columns take no memory
_CELL_BYTES = 8  # aligned, so reads are atomic
_CELLS_SIZE = _ROWS * _COLUMNS * _CELL_BYTES
# The keys of the columns follow the cells. The first row contains their lengths; its last cell contains the number of workers ever
# started and, in the lower bits, the highest row used.
_KEYS = 0
_KEY_BYTES = 384  # Triton's model names have up to 255
_SIZE = _CELLS_SIZE + _COLUMNS * _KEY_BYTES
_LAST = _COLUMNS - 1
_COUNTER = "counter "
_VARIABLE = "WORKER_TABLE_FD"
_PROCESS, _BEATS = "process", "beats"


def create() -> int:
    """Create the table of this host, for this process and its children, unless the process has inherited one.

    Returns:
        The descriptor, which must be passed on to other programs.
    """
    if not os.environ.get(_VARIABLE):
        descriptor = _create_file()
        os.set_inheritable(descriptor, True)  # noqa: FBT003
        os.environ[_VARIABLE] = str(descriptor)
    return int(os.environ[_VARIABLE])


class TableView:
    """A view of all rows. Columns are found by key."""

    def __init__(self) -> None:
        """Open the host's table, or a new one if this process has not inherited any."""
        inherited = os.environ.get(_VARIABLE)
        if not inherited:
            self._descriptor = _create_file()
        else:
            # Locks belong to an open file. With the inherited descriptor, all workers would share one.
            self._descriptor = os.open(f"/proc/self/fd/{inherited}", os.O_RDWR)
        self._memory = mmap.mmap(self._descriptor, _SIZE)
        self._cells = memoryview(self._memory).cast("q")
        self._columns: dict[str, int] = {}
        """Columns by key: the keys that this process knows, and keys that share the last column."""
        self._known = 0
        """Number of columns whose keys have been read."""

    def column(self, key: str) -> int:
        """Return the column of a key, the same in all workers. If the key is too long or no column is free, it is the last one."""
        if key not in self._columns:
            if self._memory.closed:
                return _LAST
            with self._locked():
                self._columns[key] = self._find_column(key)
        return self._columns[key]

    def counter(self, key: str) -> int:
        """Return the column of a counter, which is never reset. Counters have a key namespace of their own."""
        return self.column(_COUNTER + key)

    def keys(self) -> list[str]:
        """List the keys that any worker has used, except those of counters."""
        return [key for key in self._keys() if not key.startswith(_COUNTER)]

    def counters(self) -> list[str]:
        """List the keys of the counters that any worker has used."""
        return [key.removeprefix(_COUNTER) for key in self._keys() if key.startswith(_COUNTER)]

    def total_ever(self, column: int) -> int:
        """Return the sum over all workers ever started."""
        return sum(self._cells[row * _COLUMNS + column] for row in range(_KEYS + 1, self._cells[_LAST] % _ROWS + 1))

    def beats(self) -> dict[int, int]:
        """Return how often each living worker has called `WorkerTable.beat`, by process id."""
        process, beats = self.column(_PROCESS), self.column(_BEATS)
        rows = [row * _COLUMNS for row in range(_KEYS + 1, _ROWS) if self._is_locked(row)]
        return {self._cells[row + process]: self._cells[row + beats] for row in rows}

    def close(self) -> None:
        """Close the view."""
        self._cells = memoryview(bytearray(_COLUMNS * _CELL_BYTES)).cast("q")
        self._memory.close()
        os.close(self._descriptor)

    def _keys(self) -> list[str]:
        self._learn()
        return [key for key, column in self._columns.items() if column != _LAST]

    def _learn(self) -> None:
        """Read the keys that other processes have added."""
        while self._known < _LAST and (length := self._cells[self._known]):
            start = _CELLS_SIZE + self._known * _KEY_BYTES
            self._columns[self._memory[start : start + length].decode()] = self._known
            self._known += 1

    def _find_column(self, key: str) -> int:
        self._learn()
        if key in self._columns:
            return self._columns[key]
        encoded = key.encode()
        if self._known == _LAST or len(encoded) > _KEY_BYTES:
            return _LAST
        start = _CELLS_SIZE + self._known * _KEY_BYTES
        self._memory[start : start + len(encoded)] = encoded
        self._cells[self._known] = len(encoded)  # last, because readers do not lock
        self._known += 1
        return self._known - 1

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Prevent other processes from changing the keys."""
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
        """Return whether another worker has locked a row."""
        return self._control(fcntl.F_OFD_GETLK, fcntl.F_WRLCK, row) != fcntl.F_UNLCK

    def _control(self, command: int, kind: int, row: int) -> int:
        """Call fcntl with a `struct flock` for one row, and return the resulting lock type."""
        answer = fcntl.fcntl(self._descriptor, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, row, 1, 0))
        return int(struct.unpack_from("h", answer)[0])


class WorkerTable(TableView):
    """One row of the table, and a view of all rows of living workers."""

    def __init__(self) -> None:
        """Take a free row of the host's table.

        Raises:
            OSError: All rows are taken.
        """
        super().__init__()
        self._row = next((row for row in range(_KEYS + 1, _ROWS) if self._lock(row)), -1)
        if self._row < 0:
            raise OSError("there are more workers than rows in their table")
        self._own = self._row * _COLUMNS
        with self._locked():
            for key in self.keys():
                self.set(self.column(key), 0)
            self.set(_LAST, 0)
            workers, highest = divmod(self._cells[_LAST], _ROWS)
            self._cells[_LAST] = (workers + 1) * _ROWS + max(highest, self._row)
        self.refresh()

    def beat(self) -> None:
        """Record that this worker's event loop runs. Call this about once a second."""
        self.set(self.column(_PROCESS), os.getpid())
        self.add(self.column(_BEATS), 1)

    def add(self, column: int, value: int) -> None:
        """Add to this worker's cell. Not thread-safe."""
        self._cells[self._own + column] += value

    def set(self, column: int, value: int) -> None:
        """Set this worker's cell."""
        self._cells[self._own + column] = value

    def own(self, column: int) -> int:
        """Return this worker's cell."""
        return self._cells[self._own + column]

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
    def workers(self) -> int:
        """Number of living workers."""
        return len(self._living)

    def refresh(self) -> None:
        """Find the living workers. Call this about once a second, to notice killed workers."""
        self._seen = self._cells[_LAST]
        self._living = [row * _COLUMNS for row in range(_KEYS + 1, _ROWS) if row == self._row or self._is_locked(row)]

    def close(self) -> None:
        """Release the row. Later changes have no effect."""
        super().close()
        self._own = 0
        self._living = [0]


def _create_file() -> int:
    """Create an empty table in memory; return its descriptor."""
    descriptor = os.memfd_create("nereid-workers")
    os.truncate(descriptor, _SIZE)
    return descriptor
