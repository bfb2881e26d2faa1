"""The point in time at which a request must have its answer."""

from time import monotonic
from typing import NamedTuple


class Deadline(NamedTuple):
    """A time on the monotonic clock, which changes of the wall clock do not affect."""

    at: float
    """Seconds, as `time.monotonic` counts them."""

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """Set a deadline that many seconds from now."""
        return cls(monotonic() + seconds)

    @property
    def remaining(self) -> float:
        """Seconds left; negative once it has passed."""
        return self.at - monotonic()
