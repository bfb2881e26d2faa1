"""Memory budgets that all workers of a host share."""

from threading import Lock
from typing import Self

from app.errors import GatewayFull
from app.resilience.fairness import Caller, CallerCounts
from app.resilience.worker_table import WorkerTable


class MemoryBudget:
    """Bytes that the requests of a host use, with a limit."""

    def __init__(self, table: WorkerTable, key: str, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._counts = CallerCounts(table, key)
        self._lock = Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes in use on this host."""
        return self._counts.total

    @property
    def own_bytes(self) -> int:
        """Bytes in use by this worker."""
        return self._counts.in_worker

    def has_room(self, caller: Caller, nbytes: int = 0) -> bool:
        """Return whether a caller may use the bytes that it does, and `nbytes` more."""
        return self._counts.has_room(caller, self.limit_bytes, nbytes)

    def reserve(self, caller: Caller, purpose: str = "an image of this size") -> "Reservation":
        """Return an empty reservation for a caller; `purpose` appears in errors."""
        return Reservation(purpose, caller, self)

    def add(self, caller: Caller, nbytes: int) -> None:
        """Add to the bytes that a caller uses; `nbytes` may be negative. Thread-safe."""
        with self._lock:
            self._counts.add(caller, nbytes)


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
            if is_refused and budget.used_bytes > self.nbytes and not budget.has_room(self._caller):
                self.keep(self.nbytes - nbytes)
                raise GatewayFull(f"the gateway has no memory left for {self._purpose}", "memory")

    def keep(self, nbytes: int) -> None:
        """Release all but `nbytes`."""
        if self.nbytes > nbytes:
            for budget in self._budgets:
                budget.add(self._caller, nbytes - self.nbytes)
            self.nbytes = nbytes

    def move(self) -> "Reservation":
        """Return a reservation with all bytes of this one, which is empty then."""
        moved = Reservation(self._purpose, self._caller, *self._budgets)
        moved.nbytes, self.nbytes = self.nbytes, 0
        return moved

    def release(self) -> None:
        """Release all bytes."""
        self.keep(0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
