"""Callers who send a server all they can."""

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

import uvloop

from app.host.processes import raise_file_limit
from bench.load.driver import PATIENCE_SECONDS, Driver
from bench.load.images import Sample
from bench.load.outcome import Outcome
from bench.load.target import Target


class Caller(NamedTuple):
    """One user of a server, who sends the same request over and over."""

    target: Target
    body: bytes
    clients: int = 1
    """Number of connections."""
    bytes_per_second: int = 0
    """Speed of each upload; 0 for no limit."""
    rate: float = 0.0
    """Maximum number of requests per second; 0 for no pause."""


def flood(callers: Sequence[Caller], seconds: float) -> list[dict[str, int]]:
    """Let each client of several callers send its next request after the response to the previous one.

    Returns:
        Number of requests by result, for each caller, as in `Outcome.statuses`; without those in progress at the end.
    """

    async def send(caller: Caller) -> Outcome:
        load = Driver(caller.target, [Sample("", caller.body, None)], seconds, patience=PATIENCE_SECONDS + seconds)
        load.counts_unfinished = False
        load.bytes_per_second = caller.bytes_per_second
        if caller.rate:
            return await load.constant(caller.rate, caller.clients)
        return await load.closed(caller.clients, spread_seconds=1.0 if caller.bytes_per_second else 0.0)

    async def send_all() -> list[Outcome]:
        return await asyncio.gather(*map(send, callers))

    raise_file_limit()
    return [outcome.statuses for outcome in uvloop.run(send_all())]
