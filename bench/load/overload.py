"""Load above the capacity of a server: unlimited arrivals, and crowds of clients that retry."""

import asyncio
import math
from collections.abc import Sequence

from bench.load.closed_loop import PoliteLoop
from bench.load.connection import Connection
from bench.load.images import Sample
from bench.load.open_loop import OpenLoop
from bench.load.outcome import Outcome
from bench.load.tally import Tally

CONNECTIONS = 2000
"""Maximum number of requests in progress in `drive_arrivals`."""
PATIENCE_SECONDS = 15.0
"""Maximum time to wait for a response; longer than the gateway's deadline."""


async def drive_arrivals(  # noqa: PLR0913 - the parts of a load
    url: str,
    samples: Sequence[Sample],
    *,
    rate: float,
    seconds: float,
    connections: int = CONNECTIONS,
    patience: float = PATIENCE_SECONDS,
) -> Outcome:
    """Send `rate` requests per second, each over a free connection or a new one.

    A request that is due while all `connections` are in use is dropped and counted. Latency counts from the time when a request was
    due; requests without a response are not included. Other arguments and errors as for `drive_closed_loop`.
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
    """Run clients that send their next request after a response.

    The latency excludes requests without a response. Other arguments and errors as for `drive_closed_loop`.
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
        """Count the unanswered request of a closed connection; another connection is opened when needed."""
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


class _Crowd(PoliteLoop):
    def __init__(  # noqa: PLR0913 - as above
        self, url: str, samples: Sequence[Sample], clients: int, seconds: float, patience: float, *, is_polite: bool
    ) -> None:
        super().__init__(url, samples, clients, seconds, patience, None)
        self.tally = Tally([sample.expected for sample in samples], math.inf, seconds)
        self._is_polite = is_polite

    def begin(self) -> None:
        """Spread the first requests of the clients over a tenth of the time."""
        loop = asyncio.get_running_loop()
        pause = self.seconds / 10 / len(self.connections)
        for index, connection in enumerate(list(self.connections)):
            loop.call_later(index * pause, self.resume, connection)

    def pause_after(self, connection: Connection) -> float:
        return super().pause_after(connection) if self._is_polite else 0.0
