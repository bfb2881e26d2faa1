"""The requests in progress at one model on a host, and the few that wait for their turn."""

import math
import random
from collections.abc import Callable
from functools import partial
from time import monotonic

from app.errors import CircuitOpen, GatewayError, GatewayFull
from app.resilience.concurrency import NEAR, BatchTimes, ConcurrencyLimit
from app.resilience.deadline import Deadline, TurnMissed
from app.resilience.fairness import SHADOW, Caller, CallerCounts
from app.resilience.lease import Lease
from app.resilience.rounds import Rounds
from app.resilience.wait_queue import WaitQueue
from app.resilience.worker_table import SEPARATOR, WorkerTable

_MAX_WAIT_SECONDS = 0.03
_MAX_RETRY_SECONDS = 30
# So long at most because of the caller's other rejections: who ignores their Retry-After keeps others of its name away.
_MAX_BACKLOG_SECONDS = 15
# As many requests are told to come back while one ends: with fewer, places would stay free if some do not.
_RETRIES_PER_END = 3
# The limit until the model's speed is known.
_INITIAL_LIMIT = 32.0
# Deadlines below this multiple of the target (half of the usual deadline) are compared with the predicted wait.
_SHORT = 1.9
# This fraction of them: with all of it, most of the admitted requests would end a little too late.
_FILLED = 0.7
# A worker without measurements for this long does not contribute to the limit.
_STALE_SECONDS = 5.0
# A shorter pause is never treated as a stall.
_MIN_STALL_SECONDS = 0.1
# By this, later steps come before new requests of the same priority.
_BEFORE = 0.5
_MILLI = 1_000
_NANO = 1_000_000_000


def total_key(model: str) -> str:
    """Return the key of the table's column with the requests in progress at a model."""
    return SEPARATOR.join(("all requests", model))


class Permit(Lease):
    """Admission of one request; released when its work has ended."""

    def __init__(self, queue: "ModelQueue", part: "_Part", position: int, *, is_near: bool) -> None:
        super().__init__()
        self._queue = queue
        self._part = part
        self._position = position
        self._is_near = is_near
        self._has_little = part.counts.has_little(part.caller)
        self._began = monotonic()
        self.on_release(partial(queue.leave, part))

    @property
    def is_last(self) -> bool:
        """Whether no further request of its caller is admitted to the model before one ends."""
        return not self._queue.has_room(self._part)

    def measure(self, batch: BatchTimes | None = None) -> None:
        """Record the duration of the request when its result arrives, in time or not.

        The durations of a shadow, which lets all else pass, tell nothing of the limit; those of a caller with few requests, which
        does not wait behind the others, only count while nothing else is measured.
        """
        if self._part.caller.priority == SHADOW or (self._has_little and not self._queue.is_stale):
            return
        self._queue.measure(monotonic() - self._began, self._position, is_near=self._is_near, batch=batch)


class _Part:
    def __init__(self, queue: "ModelQueue", caller: Caller, counts: CallerCounts) -> None:
        self.caller = caller
        self.counts = counts
        """The requests of all callers that use the same fraction of the limit."""
        self.enter = partial(queue.enter, self)


class ModelQueue:
    """Admits requests to one model up to a limit that adapts to the model's speed."""

    def __init__(
        self, table: WorkerTable, model: str, ceiling: int, target_seconds: float, is_silent: Callable[[], bool] = lambda: False
    ) -> None:
        """Start without requests; `is_silent` tells whether the model has stopped to answer anything."""
        self.is_silent = is_silent
        self._table = table
        self._model = model
        self._limit_column = table.column(f"limit:{model}")
        self._pace_column = table.column(f"pace:{model}")
        self._pools: dict[str, CallerCounts] = {}
        self._parts: dict[str, _Part] = {}
        self._waiting: WaitQueue[Permit] = WaitQueue()
        self._rounds = Rounds(table, model)
        self._total = table.column(total_key(model))
        self.limit = _INITIAL_LIMIT
        """Limit of the requests in progress on the host: the average over the workers that have measured it."""
        self._target_seconds = target_seconds
        self._measured = ConcurrencyLimit(_INITIAL_LIMIT, ceiling, target_seconds)
        self._measured_at = 0.0
        self.own = 0
        """Number of this worker's requests in progress."""
        self._comes_at: dict[str, float] = {}
        """When the last rejected request of each caller is to come back."""
        self._progress_at = 0.0
        """When one of them last ended, or the first one began."""
        self._read_limit()

    @property
    def in_progress(self) -> int:
        """Requests that are in progress on the host."""
        return self._table.total(self._total)

    @property
    def waiting(self) -> int:
        """Number of this worker's requests that wait for their turn."""
        return len(self._waiting)

    def check(self, caller: Caller, uploads: int) -> None:
        """Raise GatewayFull, or CircuitOpen, if a request would find no room behind `uploads` bodies of the same caller."""
        part = self._part(caller)
        if self._rounds.comes_later(caller, self.limit):
            raise self._no_place(caller)
        if (self._waiting.has(part.enter) or not self.has_room(part)) and not self._is_worth_waiting(part, uploads):
            self._measured.note_reached()
            self._rounds.note_full(caller)
            raise self._no_place(caller)

    async def admit(self, caller: Caller, deadline: Deadline) -> Permit:
        """Admit a request, now or when its turn comes, unless it would miss its deadline; raises as `check`."""
        part = self._part(caller)
        # For the usual deadline or a longer one, the limit is sufficient.
        if deadline.remaining < _SHORT * self._target_seconds:
            ahead = part.counts.until_served(caller)
            if ahead and (ahead + 1) * self.pace() > _FILLED * deadline.remaining:
                raise self.full(caller)
        permit = None if self._waiting.has(part.enter) else part.enter()
        if permit is None:
            if not self._is_worth_waiting(part, 0):
                raise self._no_place(caller)
            try:
                permit = await self._waiting.wait(part.enter, _MAX_WAIT_SECONDS, caller.priority)
            except TimeoutError:
                raise self._no_place(caller) from None
        return permit

    async def admit_later_step(self, caller: Caller, deadline: Deadline) -> Permit:
        """Admit a part of a request that other models have answered in part, before all new requests of the same priority."""
        part = self._part(caller)
        if (permit := self.try_admit(caller)) is not None:
            return permit
        try:
            return await self._waiting.wait(part.enter, deadline.remaining, caller.priority - _BEFORE)
        except TimeoutError:
            raise TurnMissed("the turn of a later step did not come in time") from None

    def try_admit(self, caller: Caller) -> Permit | None:
        """Admit a request if there is room now and no other one of the caller is waiting."""
        part = self._part(caller)
        return None if self._waiting.has(part.enter) else part.enter()

    def leave(self, part: _Part) -> None:
        """Record the end of a request."""
        part.counts.add(part.caller, -1)
        self._table.cells[self._total] -= 1
        self.own -= 1
        self._progress_at = monotonic()
        self._waiting.wake()

    def measure(self, seconds: float, position: int, *, is_near: bool, batch: BatchTimes | None = None) -> None:
        """Record the duration of a request; see `ConcurrencyLimit.add`."""
        now = monotonic()
        was_stale = now - self._measured_at > _STALE_SECONDS
        self._measured_at = now
        is_new = self._measured.add(seconds, position, self.limit, is_near=is_near, batch=batch, workers=self._table.workers)
        if is_new or was_stale:
            self._share_limit(self._measured.value)

    def refresh(self) -> None:
        """Share this worker's limit, or withdraw it if it is stale, and forget callers that are gone. Call this regularly."""
        self._rounds.refresh()
        now = monotonic()
        self._comes_at = {caller: at for caller, at in self._comes_at.items() if at > now}
        self._share_limit(0.0 if self.is_stale else self._measured.value)

    @property
    def is_stale(self) -> bool:
        """Whether this worker has measured nothing lately."""
        return monotonic() - self._measured_at > _STALE_SECONDS

    def _share_limit(self, limit: float) -> None:
        self._table.set(self._limit_column, round(limit * _MILLI))
        self._table.set(self._pace_column, round(self._measured.pace * _NANO))
        self._read_limit()

    def _read_limit(self) -> None:
        found = [value for value in self._table.values(self._limit_column) if value]
        self.limit = sum(found) / len(found) / _MILLI if found else self._measured.value

    def _part(self, caller: Caller) -> _Part:
        part = self._parts.get(caller.name)
        if part is None or part.caller != caller:  # new, or the shares have changed
            part = self._parts[caller.name] = _Part(self, caller, self._counts("requests", caller.pool))
        return part

    def batch_counts(self, caller: Caller) -> tuple[CallerCounts, CallerCounts]:
        """Return the counts of the images of batches that are in progress, and of those that wait, in its pool."""
        return self._counts("batch images", caller.pool), self._counts("waiting batch images", caller.pool)

    def _counts(self, resource: str, pool: str) -> CallerCounts:
        key = SEPARATOR.join((resource, self._model, pool))
        counts = self._pools.get(key)
        if counts is None:
            counts = self._pools[key] = CallerCounts(self._table, key)
        return counts

    def has_room(self, part: _Part) -> bool:
        """Return whether a request could be admitted now."""
        return part.counts.has_place(part.caller, self._room(part), 1)

    def _room(self, part: _Part) -> int:
        return max(1, int(self.limit * part.caller.fraction))

    def _is_worth_waiting(self, part: _Part, uploads: int) -> bool:
        ahead = uploads + self._waiting.ahead_of(part.caller.priority)
        return 0 < (ahead + 1) * self.pace() * self._table.workers / part.caller.fraction <= _MAX_WAIT_SECONDS

    def enter(self, part: _Part) -> Permit | None:
        """Admit a request if there is room."""
        room = self._room(part)
        part.counts.add(part.caller, 1)
        if not part.counts.has_place(part.caller, room):
            part.counts.add(part.caller, -1)
            self._measured.note_reached()
            self._rounds.note_full(part.caller)
            return None
        self._rounds.note_admitted(part.caller)
        if not self.own:
            self._progress_at = monotonic()
        self._table.cells[self._total] += 1
        self.own += 1
        return Permit(self, part, self._table.total(self._total), is_near=part.counts.total >= NEAR * room)

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

    def _no_place(self, caller: Caller) -> GatewayError:
        self._rounds.note_rejected(caller)
        return self.full(caller)

    def full(self, caller: Caller) -> GatewayError:
        """Return the error for a request that cannot be admitted, with a Retry-After time."""
        if self.is_silent():
            return CircuitOpen("Triton has stopped to answer")
        # The expected end of the requests in progress, with jitter to spread the retries; later if many of the caller's were told
        # to come back by then. Rounded by chance: otherwise those of a second would come back together.
        now, pace = monotonic(), self.pace()
        comes_at = max(now, self._comes_at.get(caller.name, 0.0)) + pace * self._table.workers / _RETRIES_PER_END
        self._comes_at[caller.name] = min(comes_at, now + _MAX_BACKLOG_SECONDS)
        expected = max(self.in_progress * pace * random.uniform(1, 2), comes_at - now)  # noqa: S311
        seconds = math.floor(expected + random.random())  # noqa: S311
        seconds = min(max(1, seconds), _MAX_RETRY_SECONDS)
        return GatewayFull("as many requests as can be answered in time are in progress", "requests", seconds)
