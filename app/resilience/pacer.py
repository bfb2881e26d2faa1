"""Space out what is less urgent than the rest of the work."""

from time import monotonic

_BURST_SECONDS = 3


class Pacer:
    """Says how long each event has to wait so that they do not come more often than a rate.

    Three seconds' worth of them passes at once. None waits longer than a limit, so that above the rate they are delayed,
    but not fewer in the end.
    """

    def __init__(self, per_second: float, max_wait_seconds: float = 1.0) -> None:
        self._interval = 1 / per_second
        self._max_wait = max_wait_seconds
        self._due = 0.0

    def wait(self) -> float:
        """Return how long the next event has to wait, in seconds; 0 while they are rare."""
        now = monotonic()
        self._due = min(max(self._due, now - _BURST_SECONDS) + self._interval, now + self._max_wait)
        return max(0.0, self._due - now)
