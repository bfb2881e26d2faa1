"""How many requests may be tried again: few enough that retries never add to an overload."""

from time import monotonic

_SHARE = 0.1
_PER_SECOND = 0.1  # for rare requests


class RetryBudget:
    """One retry for every ten requests, and one every ten seconds; a few can be saved up."""

    def __init__(self, max_saved: float = 3.0) -> None:
        """Start with all that can be saved up."""
        self._max_saved = self._saved = max_saved
        self._at = monotonic()

    @property
    def saved(self) -> int:
        """Retries that are left; negative if more than that were spent."""
        now = monotonic()
        self._save((now - self._at) * _PER_SECOND)
        self._at = now
        return int(self._saved)

    def note_request(self) -> None:
        """Count a request."""
        self._save(_SHARE)

    def take(self) -> bool:
        """Take one retry; return whether there was one."""
        if self.saved < 1:
            return False
        self.spend(1)
        return True

    def spend(self, retries: int) -> None:
        """Take retries that cannot be refused any more; there are none until as many are saved up again."""
        self._saved -= retries

    def _save(self, retries: float) -> None:
        self._saved = min(self._saved + retries, self._max_saved)
