"""Clients that disconnect in the middle: during the upload, or while they wait for the answer."""

import asyncio
from pathlib import Path
from random import Random
from time import monotonic

import psutil

from bench.harness.triton import Triton
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Case, Connection, ask, ask_all, encode
from tests.faults.serving import Gateway, count_images, serving, unharmed
from tests.processes import wait_for
from tests.support import sample_image

_CAT = sample_image("chelsea.jpg")
_CLIENTS = 200
_GIVE_UPS = 10_000
_FD_TOLERANCE = 2
_SETTLE_SECONDS = 3.0  # the workers return the memory of a burst once a second
_SEED = 4605


async def _seconds_until_closed(gateway: Gateway, fds: int) -> float:
    """Wait until the workers have as few files open as before; return the seconds."""
    started = monotonic()
    await asyncio.sleep(0)  # an aborted connection is closed in the next iteration of the event loop
    wait_for(lambda: gateway.fds() <= fds + _FD_TOLERANCE)
    return monotonic() - started


async def test_a_client_that_leaves_during_the_upload(null_triton: Triton, gateway: Gateway, record_figure: RecordFigure) -> None:
    """Row 19: it is logged as 499, costs no call of Triton, and its connection is closed within a second."""
    await ask_all(gateway.url, [Case("", encode(_CAT))] * 50)
    await asyncio.sleep(1)
    calls, fds, lines = await count_images(null_triton, "null"), gateway.fds(), len(gateway.log_lines())

    with unharmed(gateway, growth_mb=50):
        for _ in range(_CLIENTS):
            connection = await Connection.open(gateway.url)
            await connection.send(encode(_CAT)[: len(_CAT) // 2])
            connection.abort()
        seconds = await _seconds_until_closed(gateway, fds)

    record_figure("left during the upload: connections closed after, s", seconds, 1)
    assert seconds <= 1
    assert [line["status"] for line in gateway.wait_for_log(lines + _CLIENTS)[lines:]] == [499] * _CLIENTS
    assert await count_images(null_triton, "null") == calls


async def test_a_client_that_leaves_during_the_inference(
    null_triton: Triton, gateway: Gateway, record_figure: RecordFigure
) -> None:
    """Row 20: it is logged as 499, Triton finishes what it has begun, and the next client finds its place free by then."""
    path = "/predict/wait_20"  # 50 ms for each image
    assert (await ask(gateway.url, encode(_CAT, path))).status == 200
    calls, lines = await count_images(null_triton, "wait_20"), len(gateway.log_lines())
    clients = 16

    with unharmed(gateway, growth_mb=50):
        connections = [await Connection.open(gateway.url) for _ in range(clients)]
        for connection in connections:
            await connection.send(encode(_CAT, path))
        await asyncio.sleep(0.2)
        for connection in connections:
            connection.abort()
        started = monotonic()
        answer = await ask(gateway.url, encode(_CAT, path))
        seconds = monotonic() - started

    record_figure("left during the inference: next answer after, s", seconds, clients * 0.05 + 0.5)
    assert answer.status == 200
    assert seconds <= clients * 0.05 + 0.5
    statuses = [line["status"] for line in gateway.wait_for_log(lines + clients + 1)[lines:]]
    accepted = clients + 1 - statuses.count(429)
    assert set(statuses) <= {200, 499, 429}
    assert statuses.count(499) >= accepted // 2  # some were answered before they left
    assert await count_images(null_triton, "wait_20") <= calls + accepted


async def test_ten_thousand_clients_that_give_up(null_triton: Triton, tmp_path: Path, record_figure: RecordFigure) -> None:
    """Row 20: clients that leave at any time after their upload make neither memory nor open files grow, and Triton survives."""
    random = Random(_SEED)  # noqa: S311 - the same delays in each run
    image = encode(_CAT)
    server = psutil.Process(null_triton.process.pid)
    created = server.create_time()
    with serving(null_triton, tmp_path) as gateway:

        async def give_up(times: int) -> None:
            for _ in range(times):
                connection = await Connection.open(gateway.url)
                await connection.send(image)
                await asyncio.sleep(random.uniform(0, 0.02))
                connection.abort()

        await asyncio.gather(*(give_up(_GIVE_UPS // 40) for _ in range(8)))
        await asyncio.sleep(_SETTLE_SECONDS)
        fds, rss = gateway.fds(), gateway.rss()
        with unharmed(gateway, growth_mb=50):
            await asyncio.gather(*(give_up(_GIVE_UPS // 8) for _ in range(8)))
            seconds = await _seconds_until_closed(gateway, fds)
            await asyncio.sleep(_SETTLE_SECONDS)  # what they have left behind in Triton ends
            assert (await ask(gateway.url, image)).status == 200

        growth = (gateway.rss() - rss) / 2**20
        statuses = [line["status"] for line in gateway.log_lines() if "status" in line]
    record_figure("10,000 clients that gave up: memory growth, MiB", growth, 50)
    record_figure("10,000 clients that gave up: connections closed after, s", seconds, 1)
    record_figure("10,000 clients that gave up: logged as 499", statuses.count(499))
    assert seconds <= 1
    assert growth < 50
    assert set(statuses) <= {200, 429, 499}
    assert null_triton.process.is_running()
    assert null_triton.process.create_time() == created
