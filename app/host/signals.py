"""Signals that ask this process to stop."""

from time import monotonic

_SAME_SECONDS = 0.5


class StopSignals:
    """Counts signals. One that follows another at once is the same one, sent twice.

    `timeout`, for example, sends one to its child and then one to the child's process group.
    """

    def __init__(self) -> None:
        self.count = 0
        self.first = 0
        """Number of the first signal; 0 before it has come."""
        self._last_at = float("-inf")

    def note(self, number: int) -> None:
        """Take note of a signal."""
        now = monotonic()
        if now - self._last_at > _SAME_SECONDS:
            self.count += 1
            self.first = self.first or number
        self._last_at = now
