"""More load than a server can bear: arrivals that nothing holds back, and crowds of clients that come back."""

import asyncio
import math
from collections.abc import Sequence
from random import Random

from bench.load.closed_loop import ClosedLoop
from bench.load.connection import Connection
from bench.load.images import Sample
from bench.load.open_loop import OpenLoop
from bench.load.outcome import Outcome
from bench.load.tally import Tally

CONNECTIONS = 2000
"""How many requests of `drive_arrivals` can be in progress at a time."""
PATIENCE_SECONDS = 15.0
"""How long a client waits for an answer: longer than the gateway's deadline."""

_JITTER = 0.1  # of the seconds that an answer names in Retry-After


async def drive_arrivals(  # noqa: PLR0913 - what a load consists of
    url: str,
    samples: Sequence[Sample],
    *,
    rate: float,
    seconds: float,
    connections: int = CONNECTIONS,
    patience: float = PATIENCE_SECONDS,
) -> Outcome:
    """Send `rate` requests per second, each over a connection that is free or else a new one.

    A request that is due while `connections` are in use is dropped and counted as such. Latency counts from the time at which
    a request was due, that of requests without an answer not at all. Other arguments and errors are those of
    `drive_closed_loop`.
    """
    return await _Arrivals(url, samples, connections, seconds, patience, rate).measure(None)


async def drive_crowd(  # noqa: PLR0913 - as above
    url: str,
    samples: Sequence[Sample],
    *,
    clients: int,
    seconds: float,
    is_polite: bool = False,
    patience: float = PATIENCE_SECONDS,
) -> Outcome:
    """Let each client send its next request when it has an answer.

    A polite client waits as long as a Retry-After header says, and up to a tenth longer, so that not all come back together.
    Latency of requests without an answer does not count. Other arguments and errors are those of `drive_closed_loop`.
    """
    return await _Crowd(url, samples, clients, seconds, patience, is_polite=is_polite).measure(None)


class _Arrivals(OpenLoop):
    def __init__(  # noqa: PLR0913, PLR0917 - as above
        self, url: str, samples: Sequence[Sample], connections: int, seconds: float, patience: float, rate: float
    ) -> None:
        super().__init__(url, samples, 1, seconds, patience, rate)
        self.tally = Tally([sample.expected for sample in samples], math.inf, seconds)
        self._most = connections
        self._opening: set[asyncio.Task[None]] = set()

    def no_connection_free(self, number: int) -> None:
        if len(self.connections) + len(self._opening) >= self._most:
            self.tally.dropped()
            return
        task = asyncio.ensure_future(self._open(number))
        self._opening.add(task)
        task.add_done_callback(self._opening.discard)

    def lost(self, connection: Connection, number: int | None, since: float) -> None:
        """Count the request that a closed connection had not answered; another is opened when it is needed."""
        self.connections.discard(connection)
        self.idle.pop(connection, None)
        if number is not None and not self.is_over:
            self.tally.gave_up(since)

    def abandon_unsent(self) -> None:
        super().abandon_unsent()
        for task in list(self._opening):
            if task.cancel():
                self.tally.refused()

    async def _open(self, number: int) -> None:
        try:
            connection = await self.connect()
        except OSError:
            self.tally.refused()
        else:
            self.send_scheduled(connection, number)


class _Crowd(ClosedLoop):
    def __init__(  # noqa: PLR0913 - as above
        self, url: str, samples: Sequence[Sample], clients: int, seconds: float, patience: float, *, is_polite: bool
    ) -> None:
        super().__init__(url, samples, clients, seconds, patience, None)
        self.tally = Tally([sample.expected for sample in samples], math.inf, seconds)
        self._is_polite = is_polite
        self._random = Random(0)  # noqa: S311 - no secret

    def begin(self) -> None:
        """Let the clients send their first requests one after the other, within a tenth of the time."""
        loop = asyncio.get_running_loop()
        pause = self.seconds / 10 / len(self.connections)
        for index, connection in enumerate(list(self.connections)):
            loop.call_later(index * pause, self._resume, connection)

    def pause_after(self, connection: Connection) -> float:
        return connection.retry_after * self._random.uniform(1, 1 + _JITTER) if self._is_polite else 0.0

    def free(self, connection: Connection) -> None:
        if pause := self.pause_after(connection):
            asyncio.get_running_loop().call_later(pause, self._resume, connection)
        else:
            super().free(connection)

    def _resume(self, connection: Connection) -> None:
        """Send the next request, unless the connection was lost in the meantime: then another one takes its place."""
        if connection in self.connections:
            super().free(connection)
