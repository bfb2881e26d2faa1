"""Clients that disconnect in the middle: during the upload, or while they wait for the answer."""

import asyncio
from time import monotonic

from bench.harness.triton import Triton
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Case, Connection, ask, ask_all, encode
from tests.faults.serving import Gateway, count_images, unharmed
from tests.processes import wait_for
from tests.support import sample_image

_CAT = sample_image("chelsea.jpg")
_CLIENTS = 200
_FD_TOLERANCE = 2


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
    statuses = [line["status"] for line in gateway.wait_for_log(lines + clients + 1)[lines:]]
    accepted = clients + 1 - statuses.count(429)
    assert set(statuses) <= {200, 499, 429}
    assert statuses.count(499) >= accepted // 2  # some were answered before they left
    assert await count_images(null_triton, "wait_20") <= calls + accepted
