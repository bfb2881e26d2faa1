"""Budget of retries, small enough that retries never worsen an overload."""

from time import monotonic

_SHARE = 0.1
_PER_SECOND = 0.1  # for low traffic


class RetryBudget:
    """One retry per ten requests plus one per ten seconds; unused retries are saved up to a maximum."""

    def __init__(self, max_saved: float = 3.0) -> None:
        self._max_saved = self._saved = max_saved
        self._at = monotonic()

    @property
    def saved(self) -> int:
        """Remaining retries; negative if more were spent than saved."""
        now = monotonic()
        self._saved = min(self._saved + (now - self._at) * _PER_SECOND, self._max_saved)
        self._at = now
        return int(self._saved)

    def note_requests(self, requests: int = 1) -> None:
        """Count requests."""
        self._saved = min(self._saved + requests * _SHARE, self._max_saved)

    def take(self) -> bool:
        """Take one retry if there is one; return whether it was taken."""
        if self.saved < 1:
            return False
        self.spend(1)
        return True

    def spend(self, retries: int) -> None:
        """Take retries that must happen; the budget may become negative."""
        self._saved -= retries
