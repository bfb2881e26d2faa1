"""The requests in progress at one model on a host, and the few that wait for their turn."""

import math
import random
from collections.abc import Callable
from functools import partial
from time import monotonic

from app.errors import CircuitOpen, GatewayError, GatewayFull
from app.resilience.concurrency import NEAR, BatchTimes, ConcurrencyLimit
from app.resilience.deadline import Deadline
from app.resilience.lease import Lease
from app.resilience.wait_queue import WaitQueue
from app.resilience.worker_table import WorkerTable

_MAX_WAIT_SECONDS = 0.03
_MAX_RETRY_SECONDS = 30
# The limit until the model's speed is known.
_INITIAL_LIMIT = 32.0
# Deadlines below this multiple of the target (half of the usual deadline) are compared with the predicted wait.
_SHORT = 1.9
# A worker without measurements for this long does not contribute to the limit.
_STALE_SECONDS = 5.0
# A shorter pause is never treated as a stall.
_MIN_STALL_SECONDS = 0.1
_MILLI = 1_000
_NANO = 1_000_000_000


class Permit(Lease):
    """Admission of one request; released when its work has ended."""

    def __init__(self, queue: "ModelQueue", part: "_Part", position: int, *, is_near: bool) -> None:
        super().__init__()
        self._queue = queue
        self._part = part
        self._position = position
        self._is_near = is_near
        self._began = monotonic()
        self.on_release(partial(queue.leave, part))

    @property
    def is_last(self) -> bool:
        """Whether no further request of its key is admitted to the model before one ends."""
        return not self._queue.has_room(self._part)

    def measure(self, batch: BatchTimes | None = None) -> None:
        """Record the duration of the request. Call this when its result arrives, in time or not."""
        self._queue.measure(monotonic() - self._began, self._position, is_near=self._is_near, batch=batch)


class _Part:
    """Requests that use the same share of the limit: those of one API key, or of all keys without a share."""

    def __init__(self, queue: "ModelQueue", column: int, fraction: float) -> None:
        self.column = column
        self.fraction = fraction
        self.waiting: WaitQueue[Permit] = WaitQueue(partial(queue.enter, self))


class ModelQueue:
    """Admits requests to one model up to a limit that adapts to the model's speed."""

    def __init__(
        self, table: WorkerTable, model: str, ceiling: int, target_seconds: float, is_silent: Callable[[], bool] = lambda: False
    ) -> None:
        """Start without requests; `is_silent` tells whether the model has stopped to answer anything."""
        self._is_silent = is_silent
        self._table = table
        self._model = model
        self._limit_column = table.column(f"limit:{model}")
        self._pace_column = table.column(f"pace:{model}")
        self._parts = {"": _Part(self, table.column(f"requests:{model}:"), 1.0)}
        self.limit = _INITIAL_LIMIT
        """Limit of the requests in progress on the host: the average over the workers that have measured it."""
        self._target_seconds = target_seconds
        self._measured = ConcurrencyLimit(_INITIAL_LIMIT, ceiling, target_seconds)
        self._measured_at = 0.0
        self.own = 0
        """Number of this worker's requests in progress."""
        self._progress_at = 0.0
        """When one of them last ended, or the first one began."""
        self._read_limit()

    @property
    def in_progress(self) -> int:
        """Requests that are in progress on the host, of those parts that this worker knows."""
        return sum(self._table.total(part.column) for part in self._parts.values())

    @property
    def waiting(self) -> int:
        """Number of this worker's requests that wait for their turn."""
        return sum(len(part.waiting) for part in self._parts.values())

    def check(self, key: str, fraction: float, uploads: int) -> None:
        """Reject a request early. The requests of the bodies that this worker is receiving, `uploads`, may come first.

        Raises:
            GatewayFull: There is no room now or soon.
            CircuitOpen: The same, because Triton has stopped to answer.
        """
        part = self._part(key, fraction)
        if (part.waiting or not self.has_room(part)) and not self._is_worth_waiting(part, uploads):
            self._measured.note_reached()
            raise self.full()

    async def admit(self, key: str, fraction: float, deadline: Deadline) -> Permit:
        """Admit a request, now or when its turn comes.

        `key` and `fraction` are those of a `Share`.

        Raises:
            GatewayFull: There is no room, or the request would miss its deadline.
            CircuitOpen: The same, because Triton has stopped to answer.
        """
        part = self._part(key, fraction)
        # For the usual deadline or a longer one, the limit is sufficient.
        if deadline.remaining < _SHORT * self._target_seconds:
            ahead = self.in_progress
            if ahead and (ahead + 1) * self.pace() > deadline.remaining:
                raise self.full()
        permit = None if part.waiting else self.enter(part)
        if permit is None:
            if not self._is_worth_waiting(part, 0):
                raise self.full()
            try:
                permit = await part.waiting.wait(_MAX_WAIT_SECONDS)
            except TimeoutError:
                raise self.full() from None
        return permit

    def try_admit(self, key: str, fraction: float) -> Permit | None:
        """Admit a request if there is room now and no other request is waiting; arguments as for `admit`."""
        part = self._part(key, fraction)
        return None if part.waiting else self.enter(part)

    def leave(self, part: _Part) -> None:
        """Record the end of a request."""
        self._table.add(part.column, -1)
        self.own -= 1
        self._progress_at = monotonic()
        part.waiting.wake()

    def measure(self, seconds: float, position: int, *, is_near: bool, batch: BatchTimes | None = None) -> None:
        """Record the duration of a request; see `ConcurrencyLimit.add`."""
        was_stale = self._is_stale
        self._measured_at = monotonic()
        is_new = self._measured.add(seconds, position, self.limit, is_near=is_near, batch=batch, workers=self._table.workers)
        if is_new or was_stale:
            self._share_limit(self._measured.value)

    def refresh(self) -> None:
        """Share this worker's limit with the other workers, or withdraw it if it is stale. Call this regularly."""
        self._share_limit(0.0 if self._is_stale else self._measured.value)

    @property
    def _is_stale(self) -> bool:
        return monotonic() - self._measured_at > _STALE_SECONDS

    def _share_limit(self, limit: float) -> None:
        self._table.set(self._limit_column, round(limit * _MILLI))
        self._table.set(self._pace_column, round(self._measured.pace * _NANO))
        self._read_limit()

    def _read_limit(self) -> None:
        found = [value for value in self._table.values(self._limit_column) if value]
        self.limit = sum(found) / len(found) / _MILLI if found else self._measured.value

    def _part(self, key: str, fraction: float) -> _Part:
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = _Part(self, self._table.column(f"requests:{self._model}:{key}"), fraction)
        part.fraction = fraction
        return part

    def has_room(self, part: _Part) -> bool:
        """Return whether a request could be admitted now."""
        return self._table.total(part.column) < self._room(part)

    def _room(self, part: _Part) -> int:
        """Return how many requests a part of the limit allows."""
        return max(1, int(self.limit * part.fraction))

    def _is_worth_waiting(self, part: _Part, uploads: int) -> bool:
        """Return whether a request's turn is expected within the maximum wait."""
        return 0 < (uploads + len(part.waiting) + 1) * self.pace() * self._table.workers / part.fraction <= _MAX_WAIT_SECONDS

    def enter(self, part: _Part) -> Permit | None:
        """Admit a request if there is room."""
        self._table.add(part.column, 1)  # counted first, so that two workers never take the same place
        requests, room = self._table.total(part.column), self._room(part)
        if requests > room:
            self._table.add(part.column, -1)
            self._measured.note_reached()
            return None
        if not self.own:
            self._progress_at = monotonic()
        self.own += 1
        position = requests if len(self._parts) == 1 else self.in_progress
        return Permit(self, part, position, is_near=requests >= NEAR * room)

    def pace(self) -> float:
        """Return the seconds between the ends of requests on this host; 0 if unknown."""
        pace = self._measured.pace
        if not pace:
            found = [value for value in self._table.values(self._pace_column) if value]
            return sum(found) / len(found) / _NANO if found else 0.0
        if not self.own:
            return pace
        # If no request has ended for longer than a request takes, scale the pace up accordingly.
        pause = monotonic() - self._progress_at
        return pace * max(1.0, pause / max(self._measured.duration, _MIN_STALL_SECONDS))

    def full(self) -> GatewayError:
        """Return the error for a request that cannot be admitted, with a Retry-After time."""
        if self._is_silent():
            return CircuitOpen("Triton has stopped to answer")
        # The expected end of the requests in progress, with jitter to spread the retries.
        seconds = math.ceil(self.in_progress * self.pace() * random.uniform(1, 2))  # noqa: S311
        seconds = min(max(1, seconds), _MAX_RETRY_SECONDS)
        return GatewayFull("as many requests as can be answered in time are in progress", "requests", seconds)
