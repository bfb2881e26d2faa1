"""Open loop: a fixed rate of requests, independent of the server's speed."""

import asyncio
from collections import deque
from collections.abc import Sequence
from time import perf_counter

from bench.load.connection import Connection
from bench.load.driver import PATIENCE_SECONDS, Driver, Progress
from bench.load.images import Sample
from bench.load.outcome import Outcome
from bench.load.target import Target

CONNECTIONS = 256
"""Maximum number of requests in progress."""


async def drive_open_loop(  # noqa: PLR0913 - the parts of a load
    url: str | Target,
    samples: Sequence[Sample],
    *,
    rate: float,
    seconds: float,
    connections: int = CONNECTIONS,
    progress: Progress | None = None,
    patience: float = PATIENCE_SECONDS,
) -> Outcome:
    """Send `rate` requests per second.

    Latency counts from the time when a request was due, not when a connection was free: a server that stalls delays all requests
    that were due meanwhile. The event loop's timers have a resolution of a millisecond. Other arguments and errors as for
    `drive_closed_loop`.
    """
    return await OpenLoop(url, samples, connections, seconds, patience, rate).measure(progress)


class OpenLoop(Driver):
    """The schedule of one run, and its free connections."""

    def __init__(  # noqa: PLR0913, PLR0917 - as above
        self, url: str | Target, samples: Sequence[Sample], connections: int, seconds: float, patience: float, rate: float
    ) -> None:
        super().__init__(url, samples, connections, seconds, patience)
        self._rate = rate
        self._total = max(1, round(rate * seconds))
        self.idle: dict[Connection, None] = {}
        """Idle connections, the most recently used one last."""
        self._waiting: deque[int] = deque()
        """Numbers of due requests that wait for a free connection."""

    def begin(self) -> None:
        """Start the schedule."""
        self.idle = dict.fromkeys(self.connections)
        self._send_due()

    def free(self, connection: Connection) -> None:
        """Send the longest waiting request, if any."""
        if self._waiting:
            self.send_scheduled(connection, self._waiting.popleft())
        else:
            self.idle[connection] = None

    def is_done(self, now: float) -> bool:  # noqa: ARG002
        """Return whether every request of the schedule has ended."""
        return self.tally.ended == self._total

    def lost(self, connection: Connection, number: int | None, since: float) -> None:
        """Count the unanswered request of a closed connection, and open another connection."""
        self.idle.pop(connection, None)
        super().lost(connection, number, since)

    def abandon_unsent(self) -> None:
        """Count the requests that were never sent."""
        for number in [*self._waiting, *range(self.issued, self._total)]:
            self.tally.gave_up(self._due(number))

    def no_connection_free(self, number: int) -> None:
        """Queue a due request until a connection is free."""
        self._waiting.append(number)

    def send_scheduled(self, connection: Connection, number: int) -> None:
        """Send a request; its latency began when it was due."""
        self.send(connection, number, self._due(number))

    def _send_due(self) -> None:
        """Send all due requests; schedule the next call."""
        if self.is_over:
            return
        now = perf_counter()
        while self.issued < self._total and (due := self._due(self.issued)) <= now:
            self.tally.due(now - due)
            if self.idle:
                self.send_scheduled(self.idle.popitem()[0], self.issued)
            else:
                self.no_connection_free(self.issued)
            self.issued += 1
        if self.issued < self._total:
            asyncio.get_running_loop().call_later(self._due(self.issued) - now, self._send_due)

    def _due(self, number: int) -> float:
        return self.started + number / self._rate
