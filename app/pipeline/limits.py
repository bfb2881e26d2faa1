"""Limits of one worker and its requests."""

from typing import NamedTuple

from app.errors import InvalidParameter
from app.imaging.header import PixelLimits

# With the default limits, a batch of 61 images has the maximum deadline, for which proxies and service managers are set up.
_MORE_PER_IMAGE = 1 / 20


class Limits(NamedTuple):
    """Limits of one worker and its requests."""

    decode_threads: int
    pixels: PixelLimits
    timeout_seconds: float
    """Time from the end of a request's body to its response."""
    max_timeout_seconds: float
    """Maximum of the time that a caller may ask for."""

    def timeout(self, timeout_ms: int | None, images: int = 1) -> float:
        """Return the seconds that a request with so many images has from the end of its body."""
        if timeout_ms is None:
            grown = self.timeout_seconds * (1 + (images - 1) * _MORE_PER_IMAGE)
            return max(self.timeout_seconds, min(grown, self.max_timeout_seconds))
        if timeout_ms > self.max_timeout_seconds * 1e3:
            raise InvalidParameter(f"timeout_ms: the maximum is {self.max_timeout_seconds * 1e3:g}")
        return timeout_ms / 1e3
