"""When a request is repeated."""

import random
from time import monotonic

import msgspec

from nereid_client.errors import NereidError, Problem

_FIRST_BACKOFF_SECONDS = 0.2
_MAX_BACKOFF_SECONDS = 10.0


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """How often, and for how long, a request is repeated after 429, 503 or a broken connection. Detection is safe to repeat."""

    attempts: int = 8
    """Maximum number of requests, including the first one."""
    total_seconds: float = 60.0
    """Time since the first request after which none is repeated."""

    def start(self) -> "Attempts":
        """Begin the first attempt of a request."""
        return Attempts(self)


class Attempts:
    """The attempts of one request so far."""

    def __init__(self, retries: Retries) -> None:
        self._left = retries.attempts
        self._until = monotonic() + retries.total_seconds
        self._backoff = _FIRST_BACKOFF_SECONDS

    def pause_after(self, error: NereidError) -> float:
        """Return the seconds to wait before the next attempt: what `Retry-After` says, and a random time that grows.

        Raises:
            NereidError: The given error, if the request must not be repeated.
        """
        self._left -= 1
        pause = random.uniform(0, self._backoff)  # noqa: S311 - so that clients do not come back together
        if isinstance(error, Problem):
            pause += error.retry_after or 0
        if not error.is_temporary or self._left <= 0 or monotonic() + pause > self._until:
            raise error
        self._backoff = min(2 * self._backoff, _MAX_BACKOFF_SECONDS)
        return pause
