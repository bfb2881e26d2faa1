"""Clients that are slow, leave, or hold bodies, directly and through NGINX: others do not notice."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from itertools import cycle, islice
from pathlib import Path
from random import Random
from time import monotonic, perf_counter
from typing import NamedTuple

import pytest

from bench.harness.triton import Triton
from bench.load.driver import Driver
from bench.load.images import unlabelled_samples
from bench.load.outcome import Outcome, merge_histograms
from tests.api.conftest import write_keys
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Case, Connection, ask_all, encode
from tests.faults.meanwhile import meanwhile
from tests.faults.serving import Gateway, count_images, serving, unharmed
from tests.nginx import proxying
from tests.processes import wait_for
from tests.support import sample_image

pytestmark = pytest.mark.usefixtures("alone")

_CAT = sample_image("chelsea.jpg")
_HEAD = b"POST /detect HTTP/1.1\r\nHost: nereid\r\n"
_JSON = b"POST /infer/object_detection HTTP/1.1\r\nHost: nereid\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_SLOW_CLIENTS = 1_000
_SECONDS, _QUIET_SECONDS = 35.0, 10.0
_TOLERANCE = 1.0  # seconds: a slow client looks once a second
_FD_TOLERANCE = 8  # connections that others keep open
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
UNREAD = SlowClient(b"GET /docs-assets/swagger_bundle.js HTTP/1.1\r\nHost: nereid\r\n\r\n" * 8, b"\r\n", reads=False)


async def hold(url: str, client: SlowClient) -> float:
    """Keep a connection open for as long as the server lets us; return the seconds."""
    started = perf_counter()
    async with await Connection.open(url) as connection:
        if not client.reads:
            connection.stop_reading()
        connection.writer.write(client.at_once)
        closed = asyncio.ensure_future(connection.wait_closed() if client.reads else asyncio.sleep(60))
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

    random = Random(4603)  # noqa: S311 - so that not all of them send at the same time
    async with meanwhile(*(insist(client, random.uniform(0, 3)) for client in clients)):
        await asyncio.sleep(4)
        yield


async def drive(url: str, seconds: float) -> Outcome:
    """Send normal traffic: 8 clients in a closed loop."""
    outcome = await Driver(f"{url}/detect", unlabelled_samples(), seconds).closed(8)
    assert set(outcome.statuses) == {"200"}
    return outcome


async def test_slow_client_is_cut_off(gateway: Gateway, record_figure: RecordFigure) -> None:
    lines = len(gateway.log_lines())
    seconds = await asyncio.gather(*(hold(gateway.url, client) for client, _ in KINDS.values()))

    for (name, (_, limit)), held in zip(KINDS.items(), seconds, strict=True):
        record_figure(f"slow client, {name}: closed after, s", held, limit + _TOLERANCE)
    wait_for(lambda: [line["status"] for line in gateway.log_lines()[lines:]].count(408) == 3)


async def test_nginx_cuts_off_a_slow_client(gateway: Gateway, tmp_path: Path, record_figure: RecordFigure) -> None:
    """A body that never pauses for long has no limit: it costs NGINX a connection, and the gateway nothing."""
    clients = {name: KINDS[name][0] for name in ("silent", "stalled header", "slow header", "stalled body")}
    with proxying([gateway.address], tmp_path) as proxy:
        lines = len(gateway.log_lines())
        seconds = await asyncio.gather(*(hold(proxy.local_url, client) for client in clients.values()))
        assert len(gateway.log_lines()) == lines
        unread = await hold(proxy.local_url, UNREAD._replace(at_once=UNREAD.at_once * 8))

    for name, held in (*zip(clients, seconds, strict=True), ("unread response", unread)):
        record_figure(f"slow client through nginx, {name}: closed after, s", held, 12)


@pytest.mark.parametrize("way", ["directly", "through nginx"])
async def test_thousand_slow_clients_do_not_slow_down_others(
    gateway: Gateway, tmp_path: Path, way: str, record_figure: RecordFigure
) -> None:
    """They at most double the p99 of normal traffic, and leave nothing behind."""
    clients = list(islice(cycle(client for client, _ in KINDS.values()), _SLOW_CLIENTS))
    with proxying([gateway.address], tmp_path) if way == "through nginx" else nullcontext() as proxy:
        url = proxy.local_url if proxy else gateway.url
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
    connections = _NGINX_CONNECTIONS if proxy else _SLOW_CLIENTS
    record_figure(f"1,000 slow clients {way}: connections at the gateway", peak - fds, connections)
    record_figure(f"1,000 slow clients {way}: p99 of others, ms", during.percentile(99), 2 * quiet)


async def test_callers_with_a_key_are_served_while_others_hold_bodies(null_triton: Triton, tmp_path: Path) -> None:
    """A route takes keys in the body: who sends none holds nothing of those that have one in a header."""
    keys = write_keys(tmp_path, ("camera", "not-a-secret", "detect"))
    silent = SlowClient(_JSON % 1000 + b"{")
    large = SlowClient(_JSON % (46 * 2**20) + b'{"image": "' + bytes(8 * 2**20), bytes(2**20))
    request = encode(_CAT, Content_Type="image/jpeg", X_API_Key="camera.not-a-secret")
    with serving(null_triton, tmp_path, settings={"api_keys_file": keys}) as gateway:
        await ask_all(gateway.url, [Case("", request)] * 50)
        with unharmed(gateway, growth_mb=100):
            async with besieged(gateway.url, [*[silent] * 1_000, *[large] * 19]):
                answers = [answer for _, answer in await ask_all(gateway.url, [Case("", request)] * 400, clients=4)]
        others = {line["status"] for line in gateway.log_lines() if line.get("route") == "/infer/object_detection"}

    assert {answer.status for answer in answers} == {200}
    assert others <= {408, 429, 499}
    assert 429 in others


async def test_client_that_leaves_during_the_upload_costs_nothing(
    null_triton: Triton, gateway: Gateway, record_figure: RecordFigure
) -> None:
    await ask_all(gateway.url, [Case("", encode(_CAT))] * 50)
    await asyncio.sleep(1)
    calls, fds, lines, clients = await count_images(null_triton, "null"), gateway.fds(), len(gateway.log_lines()), 200

    with unharmed(gateway, growth_mb=50):
        for _ in range(clients):
            connection = await Connection.open(gateway.url)
            await connection.send(encode(_CAT)[: len(_CAT) // 2])
            connection.abort()
        started = monotonic()
        await asyncio.sleep(0)  # an aborted connection is closed in the next iteration of the event loop
        wait_for(lambda: gateway.fds() <= fds + 2)

    record_figure("left during the upload: connections closed after, s", monotonic() - started, 1)
    assert [line["status"] for line in gateway.wait_for_log(lines + clients)[lines:]] == [499] * clients
    assert await count_images(null_triton, "null") == calls
