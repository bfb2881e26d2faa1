"""Signals that ask this process to stop."""

import os
from time import monotonic

_SAME_SECONDS = 0.5


class StopSignals:
    """Counts stop signals; those in quick succession, such as the two of `timeout`, count as one."""

    def __init__(self) -> None:
        self.count = 0
        self.first = 0
        """Number of the first signal; 0 before any signal."""
        self._last_at = float("-inf")

    def note(self, number: int) -> None:
        """Count a signal."""
        now = monotonic()
        if now - self._last_at > _SAME_SECONDS:
            self.count += 1
            self.first = self.first or number
        self._last_at = now


class Terminal:
    """The terminal that this process was started on, if it was."""

    def __init__(self) -> None:
        self._was_there = os.isatty(0)

    @property
    def is_closed(self) -> bool:
        """Whether the user has closed it since: the kernel sends SIGHUP, as others do to renew workers."""
        return self._was_there and not os.isatty(0)
