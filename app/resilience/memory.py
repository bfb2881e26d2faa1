"""The memory that requests of all workers may use at the same time."""

from collections.abc import Sequence
from threading import Lock
from types import TracebackType
from typing import Self

from app.errors import GatewayFull
from app.resilience.worker_table import WorkerTable


class MemoryBudget:
    """Bytes in use by the requests of a host, under a limit."""

    def __init__(self, table: WorkerTable, key: str, limit_bytes: int) -> None:
        """Count in the table's column of that key."""
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
        """Whether nothing is left."""
        return self._table.total(self._column) >= self.limit_bytes

    @property
    def own_bytes(self) -> int:
        """Bytes in use by this worker."""
        return self._table.own(self._column)

    def reserve(self, purpose: str = "an image of this size") -> "Reservation":
        """Return a reservation of no bytes, to be enlarged, for a purpose that errors name."""
        return Reservation(self, purpose)

    def add(self, nbytes: int) -> None:
        """Count bytes, or discount them if the number is negative. From any thread."""
        with self._lock:
            self._table.add(self._column, nbytes)


class Reservation:
    """A part of the budget that is given back at the end of a `with` block. From any thread."""

    def __init__(self, budget: MemoryBudget, purpose: str) -> None:
        self.nbytes = 0
        self._budget = budget
        self._purpose = purpose

    def add(self, nbytes: int) -> None:
        """Reserve more.

        Raises:
            GatewayFull: The budget has no room for it now.
        """
        self._budget.add(nbytes)  # first, so that two workers never use the same room
        self.nbytes += nbytes
        used = self._budget.used_bytes
        if used > self._budget.limit_bytes and used > self.nbytes:  # one that is larger than the budget is possible alone
            self.nbytes -= nbytes
            self._budget.add(-nbytes)
            raise GatewayFull(f"the gateway has no memory left for {self._purpose}", "memory")

    def keep(self, nbytes: int) -> None:
        """Give back what is more than that."""
        if self.nbytes > nbytes:
            self._budget.add(nbytes - self.nbytes)
            self.nbytes = nbytes

    def release(self) -> None:
        """Give it back."""
        self.keep(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self.release()


class JointReservation:
    """The same part of several budgets. From any thread."""

    def __init__(self, budgets: Sequence[MemoryBudget], purpose: str) -> None:
        """Reserve nothing yet, for a purpose that errors name."""
        self._parts = [budget.reserve(purpose) for budget in budgets]

    def add(self, nbytes: int) -> None:
        """Reserve more.

        Raises:
            GatewayFull: One of the budgets has no room for it now; those before it may have reserved it.
        """
        for part in self._parts:
            part.add(nbytes)

    def keep(self, nbytes: int) -> None:
        """Give back what is more than that."""
        for part in self._parts:
            part.keep(nbytes)

    def release(self) -> None:
        """Give it back."""
        self.keep(0)
