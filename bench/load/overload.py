"""Load above the capacity of a server: unlimited arrivals, crowds of clients that retry, and callers who send all they can."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from bench.load.closed_loop import ClosedLoop
from bench.load.connection import Connection
from bench.load.images import Sample
from bench.load.open_loop import OpenLoop
from bench.load.outcome import Outcome
from bench.load.target import Target

CONNECTIONS = 2000
"""Maximum number of requests in progress in `drive_arrivals`."""
PATIENCE_SECONDS = 15.0
"""Maximum time to wait for a response; longer than the gateway's deadline."""

_TICKS = 20  # per second, for slow uploads


async def drive_arrivals(  # noqa: PLR0913 - the parts of a load
    url: str | Target,
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
    load = _Arrivals(url, samples, 1, seconds, patience, rate)
    load.most = connections
    return await load.measure()


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
    load = _Crowd(url, samples, clients, seconds, patience)
    load.is_polite = is_polite
    return await load.measure()


class Caller(NamedTuple):
    """One user of a server, who sends the same request over and over."""

    target: Target
    body: bytes
    clients: int = 1
    """Number of connections."""
    bytes_per_second: int = 0
    """Speed of each upload; 0 for no limit."""


async def flood(callers: Sequence[Caller], seconds: float) -> list[dict[str, int]]:
    """Let each client of several callers send its next request after the response to the previous one, without a pause.

    Returns:
        Number of requests by result, for each caller, as in `Outcome.statuses`.
    """
    outcomes = await asyncio.gather(*(_Flood(caller, seconds).measure() for caller in callers))
    return [outcome.statuses for outcome in outcomes]


class _Arrivals(OpenLoop):
    times_abandoned = False
    most = CONNECTIONS
    opening = 0

    def no_connection_free(self, number: int) -> None:
        if len(self.connections) + self.opening >= self.most:
            self.tally.dropped()
            return
        self.opening += 1
        self.spawn(self._open(number))

    def lost(self, connection: Connection, number: int | None, since: float) -> None:
        """Count the unanswered request of a closed connection; another connection is opened when needed."""
        self.connections.discard(connection)
        self.idle.pop(connection, None)
        if number is not None and not self.is_over:
            self.tally.gave_up(since)

    def abandon_unsent(self) -> None:
        super().abandon_unsent()
        for _ in range(self.opening):
            self.tally.refused()

    async def _open(self, number: int) -> None:
        try:
            connection = await self.connect()
        except OSError:
            self.tally.refused()
        else:
            self.send_scheduled(connection, number)
        self.opening -= 1


class _Crowd(ClosedLoop):
    times_abandoned = False

    def begin(self) -> None:
        """Spread the first requests of the clients over a tenth of the time."""
        loop = asyncio.get_running_loop()
        pause = self.seconds / 10 / len(self.connections)
        for index, connection in enumerate(list(self.connections)):
            loop.call_later(index * pause, self.resume, connection)


class _Flood(ClosedLoop):
    counts_unfinished = False
    tick_seconds = 0.5  # there may be a thousand of them

    def __init__(self, caller: Caller, seconds: float) -> None:
        super().__init__(caller.target, [Sample("", caller.body, None)], caller.clients, seconds, PATIENCE_SECONDS + seconds)
        self._speed = caller.bytes_per_second
        self._sent: dict[Connection, int] = {}

    def begin(self) -> None:
        if self._speed:
            self.spawn(self._trickle())
        super().begin()

    def is_done(self, now: float) -> bool:
        return now - self.started >= self.seconds

    def send(self, connection: Connection, number: int, since: float) -> None:
        if not self._speed:
            super().send(connection, number, since)
            return
        self._sent[connection] = self._speed
        connection.send(self.messages[0][: self._speed], number, since)

    def lost(self, connection: Connection, number: int | None, since: float) -> None:
        self._sent.pop(connection, None)
        super().lost(connection, number, since)

    async def _trickle(self) -> None:
        """Send the next piece on each connection every second, a part of them at a time."""
        while True:
            connections = list(self._sent)
            for first in range(_TICKS):
                await asyncio.sleep(1 / _TICKS)
                for connection in connections[first::_TICKS]:
                    if connection.number is not None and connection in self._sent:
                        start = self._sent[connection]
                        self._sent[connection] = start + self._speed
                        connection.transport.write(self.messages[0][start : self._sent[connection]])
