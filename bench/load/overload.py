"""Loads that do not spare a server: a constant rate, unlimited arrivals, crowds that retry, and callers who send all they can."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from bench.load import driver
from bench.load.driver import Driver, Progress
from bench.load.images import Sample
from bench.load.outcome import Outcome
from bench.load.target import Target

OPEN_CONNECTIONS = 256
"""Maximum number of requests in progress in `drive_open_loop`."""
CONNECTIONS = 2000
"""The same in `drive_arrivals`."""
PATIENCE_SECONDS = 15.0
"""Maximum time to wait for a response; longer than the gateway's deadline."""


async def drive_open_loop(  # noqa: PLR0913 - the parts of a load
    url: str | Target,
    samples: Sequence[Sample],
    *,
    rate: float,
    seconds: float,
    connections: int = OPEN_CONNECTIONS,
    progress: Progress | None = None,
    patience: float = driver.PATIENCE_SECONDS,
) -> Outcome:
    """Send `rate` requests per second.

    Latency counts from the time when a request was due, not when a connection was free: a server that stalls delays all requests
    that were due meanwhile. The event loop's timers have a resolution of a millisecond. Other arguments and errors as for
    `drive_closed_loop`.
    """
    return await Driver(url, samples, seconds, patience).constant(rate, connections, progress)


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
    return await Driver(url, samples, seconds, patience, times_abandoned=False).constant(rate, connections, drops=True)


async def drive_crowd(  # noqa: PLR0913 - as above
    url: str,
    samples: Sequence[Sample],
    *,
    clients: int,
    seconds: float,
    is_polite: bool = False,
    patience: float = PATIENCE_SECONDS,
) -> Outcome:
    """Run clients that send their next request after a response; they begin within a tenth of the time.

    The latency excludes requests without a response. Other arguments and errors as for `drive_closed_loop`.
    """
    load = Driver(url, samples, seconds, patience, times_abandoned=False)
    load.is_polite = is_polite
    return await load.closed(clients, spread_seconds=seconds / 10)


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
        Number of requests by result, for each caller, as in `Outcome.statuses`; without those in progress at the end.
    """

    async def send(caller: Caller) -> Outcome:
        load = Driver(caller.target, [Sample("", caller.body, None)], seconds, PATIENCE_SECONDS + seconds)
        load.counts_unfinished = False
        load.bytes_per_second = caller.bytes_per_second
        return await load.closed(caller.clients, spread_seconds=1.0 if caller.bytes_per_second else 0.0)

    return [outcome.statuses for outcome in await asyncio.gather(*map(send, callers))]
