"""How many requests may be tried again: few enough that retries never add to an overload."""

from time import monotonic

_SHARE = 0.1
_PER_SECOND = 0.1  # for rare requests
_MAX_SAVED = 3.0


class RetryBudget:
    """One retry for every ten requests, and one every ten seconds; a few can be saved up."""

    def __init__(self) -> None:
        self._saved = _MAX_SAVED
        self._at = monotonic()

    def note_request(self) -> None:
        """Count a request."""
        self._saved = min(self._saved + _SHARE, _MAX_SAVED)

    def take(self) -> bool:
        """Take one retry; return whether there was one."""
        now = monotonic()
        self._saved = min(self._saved + (now - self._at) * _PER_SECOND, _MAX_SAVED)
        self._at = now
        if self._saved < 1:
            return False
        self._saved -= 1
        return True
