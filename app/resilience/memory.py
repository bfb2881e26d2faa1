"""Memory budgets that all workers of a host share."""

from collections.abc import Sequence
from threading import Lock
from types import TracebackType
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
        return self._table.own(self._column)

    def reserve(self, purpose: str = "an image of this size") -> "Reservation":
        """Return an empty reservation; `purpose` appears in errors."""
        return Reservation(self, purpose)

    def add(self, nbytes: int) -> None:
        """Add to the bytes in use; `nbytes` may be negative. Thread-safe."""
        with self._lock:
            self._table.add(self._column, nbytes)


class Reservation:
    """A reserved part of a budget, released at the end of a `with` block. May be used from any thread."""

    def __init__(self, budget: MemoryBudget, purpose: str) -> None:
        self.nbytes = 0
        self._budget = budget
        self._purpose = purpose

    def add(self, nbytes: int) -> None:
        """Reserve more bytes.

        Raises:
            GatewayFull: The budget is exhausted.
        """
        self._budget.add(nbytes)  # counted first, so that two workers never use the same room
        self.nbytes += nbytes
        used = self._budget.used_bytes
        if used > self._budget.limit_bytes and used > self.nbytes:  # a single reservation may exceed the budget
            self.nbytes -= nbytes
            self._budget.add(-nbytes)
            raise GatewayFull(f"the gateway has no memory left for {self._purpose}", "memory")

    def keep(self, nbytes: int) -> None:
        """Release all but `nbytes`."""
        if self.nbytes > nbytes:
            self._budget.add(nbytes - self.nbytes)
            self.nbytes = nbytes

    def release(self) -> None:
        """Release all bytes."""
        self.keep(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.release()


class JointReservation:
    """An equal reservation in several budgets. May be used from any thread."""

    def __init__(self, budgets: Sequence[MemoryBudget], purpose: str) -> None:
        """Create an empty reservation; `purpose` appears in errors."""
        self._parts = [budget.reserve(purpose) for budget in budgets]

    def add(self, nbytes: int) -> None:
        """Reserve more bytes.

        Raises:
            GatewayFull: A budget is exhausted; the budgets before it may have reserved the bytes.
        """
        for part in self._parts:
            part.add(nbytes)

    def keep(self, nbytes: int) -> None:
        """Release all but `nbytes`."""
        for part in self._parts:
            part.keep(nbytes)

    def release(self) -> None:
        """Release all bytes."""
        self.keep(0)
