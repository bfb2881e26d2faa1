"""Closed loop: a fixed number of clients, each sending its next request after the response to the previous one."""

import asyncio
import sys
from collections.abc import Sequence
from random import uniform
from time import perf_counter

from bench.load.connection import Connection
from bench.load.driver import PATIENCE_SECONDS, Driver, Progress
from bench.load.images import Sample
from bench.load.outcome import Outcome
from bench.load.target import Target

_JITTER = 0.1  # fraction of the seconds in Retry-After


async def drive_closed_loop(  # noqa: PLR0913 - the parts of a load
    url: str | Target,
    samples: Sequence[Sample],
    *,
    clients: int,
    seconds: float,
    requests: int | None = None,
    progress: Progress | None = None,
    patience: float = PATIENCE_SECONDS,
    is_polite: bool = False,
) -> Outcome:
    """Run clients that send their next request as soon as they have a response.

    Args:
        url: URL to post to, on this machine; or another target.
        samples: Images, sent in turn.
        clients: Number of connections.
        seconds: Duration of sending.
        requests: Maximum number of requests; None for no limit.
        progress: Called regularly.
        patience: Seconds to wait for a response.
        is_polite: Whether a client waits for the time in Retry-After, and up to a tenth more, so that they do not retry together.
    """
    loop = ClosedLoop(url, samples, clients, seconds, patience)
    loop.is_polite = is_polite
    if requests is not None:
        loop.limit = requests
    return await loop.measure(progress)


class ClosedLoop(Driver):
    """The clients of one run."""

    is_polite = False
    limit = sys.maxsize
    """Maximum number of requests."""

    def begin(self) -> None:
        """Make every client send its first request."""
        for connection in list(self.connections):
            self.resume(connection)

    def free(self, connection: Connection) -> None:
        """Send the next request, at once or after the pause."""
        if pause := self.pause_after(connection):
            asyncio.get_running_loop().call_later(pause, self.resume, connection)
        else:
            self.resume(connection)

    def resume(self, connection: Connection) -> None:
        """Send the next request, unless the run is over, or the connection was lost meanwhile and replaced by another one."""
        now = perf_counter()
        if connection in self.connections and self._may_send(now):
            self.issued += 1
            self.send(connection, self.issued - 1, now)

    def is_done(self, now: float) -> bool:
        """Return whether the last request has ended."""
        return self.issued == self.tally.ended and not self._may_send(now)

    def connection_refused(self) -> None:
        """Count a request that the client could not send."""
        if self._may_send(perf_counter()):
            self.issued += 1
            self.tally.refused()

    def pause_after(self, connection: Connection) -> float:
        """Return the time in Retry-After, if any, and up to a tenth more."""
        return connection.retry_after * uniform(1, 1 + _JITTER) if self.is_polite else 0.0  # noqa: S311 - not a secret

    def _may_send(self, now: float) -> bool:
        return self.issued < self.limit and now - self.started < self.seconds
