"""Rounds: equal numbers of admissions, not left to chance, for callers while more of them ask than there are places."""

import math
from time import monotonic

from app.resilience.fairness import Caller
from app.resilience.worker_table import WorkerTable

# A caller that has not asked for this long is gone.
_GONE_SECONDS = 10.0
# A place is kept for others for this long after the last rejection because there was none: they may not come back.
_KEEP_SECONDS = 0.1
# More admissions than this above the average do not count: those while there were places for all would raise the average.
_MAX_LEAD = 2


class Rounds:
    """The callers of a worker that ask for places at a model, and how often each was admitted; compared with all workers'."""

    def __init__(self, table: WorkerTable, model: str) -> None:
        """Count in the table's columns for this model."""
        self._table = table
        self._callers = table.column(f"callers:{model}")
        self._sum = table.column(f"admissions:{model}")
        self._admissions: dict[str, int] = {}
        """Number of admissions of each caller, from the average on."""
        self._asked_at: dict[str, float] = {}
        """When each caller last asked, in order of that time."""
        self._due_column = table.column(f"due:{model}")
        self._due = set[str]()
        """Callers that were rejected though not admitted more often than the average, and have not asked since."""
        self._full_at = -math.inf

    def comes_later(self, caller: Caller, places: float) -> bool:
        """Return whether a caller must leave a free place to those that were admitted less often."""
        was_full = monotonic() - self._full_at <= _KEEP_SECONDS
        if caller.has_share or not was_full or self._table.total(self._callers) <= places:
            return False
        self._note_asking(caller)
        return self._admissions[caller.name] > self._average and self._table.total(self._due_column) > 0

    def refresh(self) -> None:
        """Forget the callers that are gone. Call this regularly: otherwise they would count for the other workers."""
        now = monotonic()
        while self._asked_at and now - self._asked_at[gone := next(iter(self._asked_at))] > _GONE_SECONDS:
            del self._asked_at[gone]
            self._count(-1, -self._admissions.pop(gone))
            self._set_due(gone, is_due=False)

    def note_full(self, caller: Caller) -> None:
        """Record that there was no place for a caller; one with a share has places of its own."""
        if not caller.has_share:
            self._full_at = monotonic()

    def note_rejected(self, caller: Caller) -> None:
        """Record that a caller was rejected because there was no place, or none for it."""
        if not caller.has_share:
            self._note_asking(caller)
            self._set_due(caller.name, is_due=self._admissions[caller.name] <= self._average)

    def _note_asking(self, caller: Caller) -> None:
        if self._asked_at.pop(caller.name, None) is None:
            self._admissions[caller.name] = int(self._average)
            self._count(1, self._admissions[caller.name])
        self._asked_at[caller.name] = monotonic()
        self._set_due(caller.name, is_due=False)

    def note_admitted(self, caller: Caller) -> None:
        """Record an admission."""
        admissions = self._admissions.get(caller.name)
        if admissions is not None and admissions < self._average + _MAX_LEAD:
            self._admissions[caller.name] += 1
            self._count(0, 1)

    def _set_due(self, name: str, *, is_due: bool) -> None:
        (self._due.add if is_due else self._due.discard)(name)
        self._table.set(self._due_column, len(self._due))

    @property
    def _average(self) -> float:
        return self._table.total(self._sum) / max(1, self._table.total(self._callers))

    def _count(self, callers: int, admissions: int) -> None:
        self._table.add(self._callers, callers)
        self._table.add(self._sum, admissions)
