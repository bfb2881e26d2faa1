"""Memory budgets that all workers of a host share."""

from functools import partial
from typing import Self

from app.errors import GatewayFull
from app.resilience.fairness import Caller, CallerCounts
from app.resilience.lease import Lease
from app.resilience.worker_table import WorkerTable


class MemoryBudget(CallerCounts):
    """Bytes that the requests of a host use, with a limit."""

    def __init__(self, table: WorkerTable, key: str, limit_bytes: int) -> None:
        super().__init__(table, key, limit_bytes)
        self.limit_bytes = limit_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in use on this host."""
        return self.total

    @property
    def own_bytes(self) -> int:
        """Bytes in use by this worker."""
        return self.in_worker

    def reserve(self, caller: Caller, purpose: str = "an image of this size") -> "Reservation":
        """Return an empty reservation for a caller; `purpose` appears in errors."""
        return Reservation(purpose, caller, self)


class Reservation:
    """Reserved bytes in one or several budgets, released at the end of a `with` block. May be used from any thread."""

    def __init__(self, purpose: str, caller: Caller, *budgets: MemoryBudget) -> None:
        """Create an empty reservation for a caller; `purpose` appears in errors."""
        self.nbytes = 0
        self._caller = caller
        self._budgets = budgets
        self._purpose = purpose

    def add(self, nbytes: int, *, is_refused: bool = True) -> None:
        """Reserve more bytes; raises GatewayFull if a budget is exhausted.

        The bytes of work that is bounded otherwise, and without which others are held in vain, are only counted: not `is_refused`.
        """
        self.nbytes += nbytes
        for budget in self._budgets:
            budget.add(self._caller, nbytes)  # counted first, so that two workers never use the same room
        for budget in self._budgets:  # a single reservation may exceed each
            if is_refused and not budget.has_room(self._caller) and budget.used_bytes > self.nbytes:
                self.keep(self.nbytes - nbytes)
                raise GatewayFull(f"the gateway has no memory left for {self._purpose}", "memory")

    def keep(self, nbytes: int) -> None:
        """Release all but `nbytes`."""
        if self.nbytes > nbytes:
            for budget in self._budgets:
                budget.add(self._caller, nbytes - self.nbytes)
            self.nbytes = nbytes

    def move_to(self, lease: Lease) -> None:
        """Let a lease release all bytes of this reservation, which is empty then."""
        for budget in self._budgets:
            lease.on_release(partial(budget.add, self._caller, -self.nbytes))
        self.nbytes = 0

    def release(self) -> None:
        """Release all bytes."""
        self.keep(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.keep(0)
