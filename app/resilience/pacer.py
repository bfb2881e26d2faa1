"""Space out what is less urgent than the rest of the work."""

from time import monotonic

_BURST_SECONDS = 3
_MAX_WAIT_SECONDS = 1


class Pacer:
    """Says how long each event has to wait so that they do not come more often than a rate.

    Three seconds' worth of them passes at once. None waits longer than a second, so that above the rate they are delayed,
    but not fewer in the end.
    """

    def __init__(self, per_second: float) -> None:
        self._interval = 1 / per_second
        self._due = 0.0

    def wait(self) -> float:
        """Return how long the next event has to wait, in seconds; 0 while they are rare."""
        now = monotonic()
        self._due = min(max(self._due, now - _BURST_SECONDS) + self._interval, now + _MAX_WAIT_SECONDS)
        return max(0.0, self._due - now)
