"""Clients that send nothing, or send and read as slowly as they can, directly and through NGINX."""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from random import Random
from time import perf_counter
from typing import NamedTuple

import pytest

from bench.load.driver import Driver
from bench.load.images import unlabelled_samples
from bench.load.outcome import Outcome, merge_histograms
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Connection
from tests.faults.meanwhile import meanwhile
from tests.faults.serving import Gateway, unharmed
from tests.nginx import proxying
from tests.processes import wait_for

_HEAD = b"POST /detect HTTP/1.1\r\nHost: nereid\r\n"
_SLOW_CLIENTS = 1_000
_SECONDS = 60.0
_QUIET_SECONDS = 15.0
_TOLERANCE = 1.0  # seconds: a slow client looks once a second
_FD_TOLERANCE = 8  # connections that others keep open
_SEED = 4603
_NGINX_CONNECTIONS = 32  # as many as it keeps open


class SlowClient(NamedTuple):
    at_once: bytes
    every_second: bytes = b""
    reads: bool = True
    """Whether it takes the answer."""


# A body may pause for 10 s and take 30 s; a client that is answered early has 2 s more to finish sending.
KINDS = {
    "silent": (SlowClient(b""), 10),
    "stalled header": (SlowClient(_HEAD), 10),
    "slow header": (SlowClient(_HEAD, b"X"), 10),
    "stalled body": (SlowClient(_HEAD + b"Content-Length: 100000\r\n\r\n" + bytes(50_000)), 12),
    "slow body": (SlowClient(_HEAD + b"Content-Length: 100000\r\n\r\n", b"x"), 32),
    "slow chunked body": (SlowClient(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\nx\r\n"), 32),
}
"""Slow clients by what they do, and the seconds after which the gateway must have closed the connection."""
UNREAD = SlowClient(b"GET /docs-assets/swagger_bundle.js HTTP/1.1\r\nHost: nereid\r\n\r\n", b"\r\n", reads=False)


async def hold(url: str, client: SlowClient) -> float:
    """Keep a connection open for as long as the server lets us; return the seconds."""
    started = perf_counter()
    async with await Connection.open(url) as connection:
        if not client.reads:
            connection.stop_reading()
        connection.writer.write(client.at_once)
        closed = asyncio.ensure_future(connection.wait_closed() if client.reads else asyncio.sleep(_SECONDS))
        try:
            while not closed.done() and not connection.writer.is_closing():
                await asyncio.wait([closed], timeout=1)
                connection.writer.write(client.every_second)
        finally:
            closed.cancel()
    return perf_counter() - started


@asynccontextmanager
async def besieged(url: str, clients: Sequence[SlowClient]) -> AsyncIterator[None]:
    """Keep slow clients busy during a block: each connects again when its connection is closed."""

    async def insist(client: SlowClient, delay: float) -> None:
        await asyncio.sleep(delay)
        while True:
            with suppress(ConnectionError):
                await hold(url, client)

    random = Random(_SEED)  # noqa: S311 - so that not all of them send at the same time
    async with meanwhile(*(insist(client, random.uniform(0, 3)) for client in clients)):
        await asyncio.sleep(4)
        yield


async def drive(url: str, seconds: float) -> Outcome:
    """Send normal traffic: 8 clients in a closed loop."""
    outcome = await Driver(f"{url}/detect", unlabelled_samples(), seconds).closed(8)
    assert set(outcome.statuses) == {"200"}
    return outcome


@contextmanager
def reaching(gateway: Gateway, way: str, folder: Path) -> Iterator[str]:
    """Go directly or through NGINX, which runs until the block ends; yields the URL."""
    if way == "directly":
        yield gateway.url
    else:
        with proxying([gateway.address], folder) as proxy:
            yield proxy.local_url


async def test_a_slow_client_is_cut_off(gateway: Gateway, record_figure: RecordFigure) -> None:
    """Rows 21 and 22: a connection that sends nothing, or too slowly, is closed, whatever part of a request it sends."""
    lines = len(gateway.log_lines())
    seconds = await asyncio.gather(*(hold(gateway.url, client) for client, _ in KINDS.values()))

    for (name, (_, limit)), held in zip(KINDS.items(), seconds, strict=True):
        record_figure(f"slow client, {name}: closed after, s", held, limit + _TOLERANCE)
    wait_for(lambda: [line["status"] for line in gateway.log_lines()[lines:]].count(408) == 3)


async def test_nginx_cuts_off_a_slow_client(gateway: Gateway, tmp_path: Path, record_figure: RecordFigure) -> None:
    """Rows 21 and 22: a body that never pauses for long has no limit: it costs NGINX a connection, and the gateway nothing."""
    clients = {name: KINDS[name][0] for name in ("silent", "stalled header", "slow header", "stalled body")}
    with proxying([gateway.address], tmp_path) as proxy:
        lines = len(gateway.log_lines())
        seconds = await asyncio.gather(*(hold(proxy.local_url, client) for client in clients.values()))
        assert len(gateway.log_lines()) == lines
        unread = await hold(proxy.local_url, UNREAD._replace(at_once=UNREAD.at_once * 8))

    for name, held in (*zip(clients, seconds, strict=True), ("unread response", unread)):
        record_figure(f"slow client through nginx, {name}: closed after, s", held, 12)


async def test_unread_responses_cost_little_memory(gateway: Gateway, record_figure: RecordFigure) -> None:
    """Row 21: a client that does not read costs the workers 1 MiB at most, however much it has asked for."""
    clients = 100
    before = gateway.rss()
    async with besieged(gateway.url, [UNREAD._replace(at_once=UNREAD.at_once * 8)] * clients):
        growth = (gateway.rss() - before) / 2**20

    record_figure(f"{clients} clients with unread responses: memory growth, MiB", growth, clients)


@pytest.mark.parametrize("way", ["directly", "through nginx"])
async def test_a_thousand_slow_clients_do_not_slow_down_others(
    gateway: Gateway, tmp_path: Path, way: str, record_figure: RecordFigure
) -> None:
    """Row 21: 1,000 slow clients of all kinds for a minute at most double the p99 of normal traffic, and leave nothing behind."""
    clients = list(islice(cycle(client for client, _ in KINDS.values()), _SLOW_CLIENTS))
    with reaching(gateway, way, tmp_path) as url:
        await drive(url, 3)
        fds = gateway.fds()
        before = await drive(url, _QUIET_SECONDS)
        with unharmed(gateway, growth_mb=50):
            async with besieged(url, clients):
                peak = gateway.fds()
                during = await drive(url, _SECONDS)
            wait_for(lambda: gateway.fds() <= fds + _FD_TOLERANCE)
        after = await drive(url, _QUIET_SECONDS)

    quiet = merge_histograms([before.latency, after.latency]).get_value_at_percentile(99) / 1e3
    connections = _NGINX_CONNECTIONS if way == "through nginx" else _SLOW_CLIENTS
    record_figure(f"1,000 slow clients {way}: connections at the gateway", peak - fds, connections)
    record_figure(f"1,000 slow clients {way}: p99 of others, ms", during.percentile(99), 2 * quiet)
    record_figure(f"1,000 slow clients {way}: requests/s of others, before {before.rate:.0f}", during.rate)
