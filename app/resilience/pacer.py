"""Delay events that exceed a rate."""

from time import monotonic

_BURST_SECONDS = 3
_MAX_WAIT_SECONDS = 1


class Pacer:
    """Computes the delay of each event that limits a rate.

    A burst of three seconds' worth of events passes without delay. The delay is at most one second, so a permanently higher rate
    is delayed but not reduced.
    """

    def __init__(self, per_second: float) -> None:
        self._interval = 1 / per_second
        self._due = 0.0

    def wait(self) -> float:
        """Return the delay of the next event in seconds; 0 below the rate."""
        now = monotonic()
        self._due = min(max(self._due, now - _BURST_SECONDS) + self._interval, now + _MAX_WAIT_SECONDS)
        return max(0.0, self._due - now)
