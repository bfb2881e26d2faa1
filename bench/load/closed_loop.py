"""Closed loop: a fixed number of clients, each sending its next request after the response to the previous one."""

import sys
from collections.abc import Sequence

from bench.load.driver import PATIENCE_SECONDS, Driver, Progress
from bench.load.images import Sample
from bench.load.outcome import Outcome
from bench.load.target import Target


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
    """Run clients that send their next request as soon as they have a response. Errors as for `Driver`.

    Args:
        url: URL to post to, on this machine; or another target.
        samples: Images, sent in turn.
        clients: Number of connections.
        seconds: Duration of sending.
        requests: Maximum number of requests; None for no limit.
        progress: Called regularly.
        patience: Seconds to wait for a response.
        is_polite: Whether a client waits for the time in Retry-After.
    """
    driver = Driver(url, samples, seconds, patience)
    driver.limit = sys.maxsize if requests is None else requests
    driver.is_polite = is_polite
    return await driver.closed(clients, progress)
