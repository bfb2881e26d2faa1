"""What one worker allows itself and its callers."""

from typing import NamedTuple

from app.errors import InvalidParameter
from app.imaging.header import PixelLimits


class Limits(NamedTuple):
    """What one worker allows itself and its callers."""

    decode_threads: int
    pixels: PixelLimits
    """Maximum sizes of images, checked in their headers."""
    timeout_seconds: float
    """Time from the end of a request's body to its response."""
    max_timeout_seconds: float
    """The same at most, if the caller sets it."""

    def timeout(self, timeout_ms: int | None) -> float:
        """Return the time that a request has from the end of its body to its response, seconds.

        Args:
            timeout_ms: What the caller asks for; None for the default.

        Raises:
            InvalidParameter: That is too long.
        """
        if timeout_ms is None:
            return self.timeout_seconds
        if timeout_ms > self.max_timeout_seconds * 1e3:
            raise InvalidParameter(f"timeout_ms: the maximum is {self.max_timeout_seconds * 1e3:g}")
        return timeout_ms / 1e3
