"""Delay rejections that exceed a rate."""

import asyncio
import random
from collections import defaultdict
from time import monotonic

from app.resilience.fairness import Caller

# Rejections per second of one worker, which take less than a third of a core, and of each caller.
_OF_ALL, _OF_ONE = 300, 20
# A burst of so many seconds' worth of rejections is not delayed.
_BURST_SECONDS = 3
_MAX_WAIT_SECONDS = 2.0
# A rejected request may keep its body while it waits.
_MAX_WAITING, _MAX_BYTES = 2_000, 64 << 20


class Pacer:
    """Computes the delay of each event above a rate: two seconds at most, so a lasting higher rate is delayed, but not reduced."""

    def __init__(self, per_second: float) -> None:
        self._interval = 1 / per_second
        self._due = 0.0

    def wait(self) -> float:
        """Return the delay of the next event in seconds; 0 below the rate."""
        now = monotonic()
        self._due = min(max(self._due, now - _BURST_SECONDS) + self._interval, now + _MAX_WAIT_SECONDS)
        return max(0.0, self._due - now)


class RejectionPacer:
    """Delays the rejections of one worker, because clients that retry at once would take the CPU from other callers."""

    def __init__(self) -> None:
        self._all = Pacer(_OF_ALL)
        self._callers: defaultdict[str, Pacer] = defaultdict(lambda: Pacer(_OF_ONE))
        self._waiting = self._bytes = 0

    async def pace(self, caller: Caller, nbytes: int) -> None:
        """Wait before a rejection of a request with `nbytes` of body is sent, unless too many wait."""
        seconds = max(self._all.wait(), self._callers[caller.name].wait())
        if not seconds or self._waiting >= _MAX_WAITING or self._bytes + nbytes > _MAX_BYTES:
            return
        self._waiting += 1
        self._bytes += nbytes
        try:
            # Callers that were rejected at the same time would ask again at the same time, and leave places free between.
            await asyncio.sleep(seconds * random.uniform(0.75, 1.25))  # noqa: S311
        finally:
            self._waiting -= 1
            self._bytes -= nbytes
