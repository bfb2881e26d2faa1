"""Memory budgets that all workers of a host share."""

from threading import Lock
from typing import Self

from app.errors import GatewayFull
from app.resilience.worker_table import WorkerTable


class MemoryBudget:
    """Bytes that the requests of a host use, with a limit."""

    def __init__(self, table: WorkerTable, key: str, limit_bytes: int) -> None:
        """Count in the table's column with this key."""
        self.limit_bytes = limit_bytes
        self._table = table
        self._column = table.column(key)
        self._lock = Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes in use on this host."""
        return self._table.total(self._column)

    @property
    def is_full(self) -> bool:
        """Whether the limit is reached."""
        return self._table.total(self._column) >= self.limit_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes in use by this worker."""
        return self._table.cells[self._column]

    def reserve(self, purpose: str = "an image of this size") -> "Reservation":
        """Return an empty reservation; `purpose` appears in errors."""
        return Reservation(purpose, self)

    def add(self, nbytes: int) -> None:
        """Add to the bytes in use; `nbytes` may be negative. Thread-safe."""
        with self._lock:
            self._table.add(self._column, nbytes)


class Reservation:
    """Reserved bytes in one or several budgets, released at the end of a `with` block. May be used from any thread."""

    def __init__(self, purpose: str, *budgets: MemoryBudget) -> None:
        """Create an empty reservation; `purpose` appears in errors."""
        self.nbytes = 0
        self._budgets = budgets
        self._purpose = purpose

    def add(self, nbytes: int) -> None:
        """Reserve more bytes.

        Raises:
            GatewayFull: A budget is exhausted.
        """
        self.nbytes += nbytes
        for budget in self._budgets:
            budget.add(nbytes)  # counted first, so that two workers never use the same room
        for budget in self._budgets:
            used = budget.used_bytes
            if used > budget.limit_bytes and used > self.nbytes:  # a single reservation may exceed the budget
                self.keep(self.nbytes - nbytes)
                raise GatewayFull(f"the gateway has no memory left for {self._purpose}", "memory")

    def keep(self, nbytes: int) -> None:
        """Release all but `nbytes`."""
        if self.nbytes > nbytes:
            for budget in self._budgets:
                budget.add(nbytes - self.nbytes)
            self.nbytes = nbytes

    def release(self) -> None:
        """Release all bytes."""
        self.keep(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
