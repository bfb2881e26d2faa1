"""Deadlines of requests."""

from time import monotonic
from typing import NamedTuple

from app.errors import DeadlinePassed


class Deadline(NamedTuple):
    """A time on the monotonic clock."""

    at: float
    """Seconds of `time.monotonic`."""

    @classmethod
    def after(cls, seconds: float) -> "Deadline":
        """Return the deadline this many seconds from now."""
        return cls(monotonic() + seconds)

    @property
    def remaining(self) -> float:
        """Seconds left; negative after the deadline."""
        return self.at - monotonic()


class TurnMissed(DeadlinePassed):
    """The deadline passed before the model was asked, which tells nothing of the model."""
