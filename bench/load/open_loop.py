"""Open loop: a fixed rate of requests, independent of the server's speed."""

from collections.abc import Sequence

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
    return await Driver(url, samples, seconds, patience).constant(rate, connections, progress)
