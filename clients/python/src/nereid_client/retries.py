"""When a request is repeated."""

import random
from time import monotonic
from urllib.request import getproxies

import httpx
import msgspec

from nereid_client.errors import Problem, Unreachable, address, is_local

_FIRST_BACKOFF_SECONDS = 0.2
_MAX_BACKOFF_SECONDS = 10.0
_TEMPORARY_STATUS = {429, 503}
_NEVER_SENT = (httpx.ConnectError, httpx.ConnectTimeout)
_BROKEN = (httpx.NetworkError, httpx.RemoteProtocolError, httpx.ConnectTimeout)


class Retries(msgspec.Struct, frozen=True, kw_only=True):
    """How often, and for how long, a request is repeated after 429, 503 or a broken connection. All are safe to repeat."""

    attempts: int = 8
    """Maximum number of requests, including the first one."""
    total_seconds: float = 60.0
    """Time since the first request after which none is repeated."""


class Attempts:
    """The attempts of one request so far."""

    def __init__(self, retries: Retries) -> None:
        self._left = retries.attempts
        self._until = monotonic() + retries.total_seconds
        self._backoff = _FIRST_BACKOFF_SECONDS
        self._is_unknown = False

    def may_have_deleted(self, error: httpx.RequestError | Problem) -> bool:
        """Return whether a request does not find what an earlier attempt without a response may have deleted."""
        return self._is_unknown and isinstance(error, Problem) and error.status == httpx.codes.NOT_FOUND

    def pause_after(self, error: httpx.RequestError | Problem) -> float:
        """Return the seconds to wait before the next attempt: what `Retry-After` says, and a random time that grows.

        Raises:
            Problem: The given one, if the request must not be repeated.
            Unreachable: Instead of an error of httpx.
        """
        self._left -= 1
        self._is_unknown |= isinstance(error, httpx.RequestError) and not isinstance(error, _NEVER_SENT)
        pause = random.uniform(0, self._backoff)  # noqa: S311 - so that clients do not come back together
        self._backoff = min(2 * self._backoff, _MAX_BACKOFF_SECONDS)
        if isinstance(error, Problem):
            pause += error.retry_after or 0
        is_temporary = error.status in _TEMPORARY_STATUS if isinstance(error, Problem) else isinstance(error, _BROKEN)
        if is_temporary and self._left > 0 and monotonic() + pause <= self._until:
            return pause
        if isinstance(error, Problem):
            raise error
        url, why = error.request.url, str(error) or type(error).__name__
        proxy = "" if is_local(url) or url.scheme not in getproxies() else "; the environment names a proxy for it"
        raise Unreachable(f"{address(url)} does not respond: {why}{proxy}") from error
