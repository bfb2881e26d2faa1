"""Delay events that exceed a rate."""

from time import monotonic

_BURST_SECONDS = 3


class Pacer:
    """Computes the delay of each event that limits a rate.

    A burst of three seconds' worth of events passes without delay. The delay is limited, so a permanently higher rate is delayed
    but not reduced.
    """

    def __init__(self, per_second: float, max_wait_seconds: float = 1.0) -> None:
        self._interval = 1 / per_second
        self._max_wait = max_wait_seconds
        self._due = 0.0

    def wait(self) -> float:
        """Return the delay of the next event in seconds; 0 below the rate."""
        now = monotonic()
        self._due = min(max(self._due, now - _BURST_SECONDS) + self._interval, now + self._max_wait)
        return max(0.0, self._due - now)
