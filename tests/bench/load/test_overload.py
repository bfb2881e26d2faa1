"""More load than a server can bear, on real sockets."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress

import pytest

from bench.load.images import Sample
from bench.load.overload import drive_arrivals, drive_crowd
from tests.bench.support import CAT, SAMPLE, always, answer, serving, silent

FULL = "429 Too Many Requests"
LARGE = Sample("large", b"\xff\xd8" + bytes(32 * 2**20), frozenset())
"""More than the buffers of two sockets hold."""


@asynccontextmanager
async def rejecting(response: bytes, *, closes: bool) -> AsyncIterator[str]:
    """Serve an answer as soon as a request's head has arrived, without reading its body; yield the URL."""
    is_over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(asyncio.IncompleteReadError, OSError):  # the driver has left
            await reader.readuntil(b"\r\n\r\n")
            writer.write(response)
            await writer.drain()
            if not closes:
                await is_over.wait()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        is_over.set()


async def test_arrivals_do_not_wait_for_answers() -> None:
    everyone = asyncio.Event()

    async def reply(number: int, _request: bytes) -> bytes:
        if number == 39:
            everyone.set()
        await everyone.wait()
        return answer(CAT)

    async with serving(reply) as server:
        outcome = await drive_arrivals(server.url, [SAMPLE], rate=200, seconds=0.2)

    assert outcome.statuses == {"200": 40}
    assert server.connections == 40


async def test_requests_without_a_connection_are_dropped() -> None:
    never = asyncio.Event()
    async with serving(silent(never)) as server:
        outcome = await drive_arrivals(server.url, [SAMPLE], rate=200, seconds=0.2, connections=3, patience=2)
        never.set()

    assert outcome.statuses == {"dropped": 37, "error": 3}
    assert server.requests == 3
    assert outcome.requests == 40


async def test_a_request_that_was_given_up_has_no_latency() -> None:
    """Only answers are timed: latency under overload tells how long the served ones took."""
    never = asyncio.Event()
    async with serving(silent(never)) as server:
        arrivals = await drive_arrivals(server.url, [SAMPLE], rate=50, seconds=0.1, patience=0.1)
        crowd = await drive_crowd(server.url, [SAMPLE], clients=2, seconds=0.1, patience=0.1)
        never.set()

    assert arrivals.statuses == {"error": 5}
    assert set(crowd.statuses) == {"error"}
    assert arrivals.histogram.total_count == crowd.histogram.total_count == 0


async def test_a_server_that_vanishes_costs_each_arrival_an_error() -> None:
    async with serving(always(answer(CAT))) as server:

        async def vanish(_number: int, _request: bytes) -> None:
            server.stop()

        server.reply = vanish
        outcome = await drive_arrivals(server.url, [SAMPLE], rate=50, seconds=0.4)

    assert outcome.statuses == {"error": 20}


@pytest.mark.parametrize("closes", [True, False], ids=["closes", "stays"])
@pytest.mark.parametrize("header", ["Connection: close", "x-more: 1"])
async def test_an_answer_may_arrive_before_the_request_was_sent(header: str, *, closes: bool) -> None:
    """A rejection of a request whose body is still on its way counts as that; the rest of the body is not sent."""
    async with rejecting(answer(b"{}", FULL, header), closes=closes) as url:
        outcome = await drive_arrivals(url, [LARGE], rate=20, seconds=0.3)

    assert outcome.statuses == {"429": 6}


@pytest.mark.parametrize("more", [[], ["Connection: close"]], ids=["stays", "closes"])
async def test_a_polite_client_waits_as_long_as_it_was_told(more: list[str]) -> None:
    async with serving(always(answer(b"{}", FULL, "Retry-After: 60", *more))) as server:
        polite = await drive_crowd(server.url, [SAMPLE], clients=5, seconds=1, is_polite=True)
        others = await drive_crowd(server.url, [SAMPLE], clients=5, seconds=0.5)

    assert polite.statuses == {"429": 5}
    assert others.requests > 5


async def test_a_polite_client_that_was_answered_does_not_wait() -> None:
    responses = [answer(b"{}", FULL, "Retry-After: 0"), answer(CAT, "200 OK", "Retry-After: 60"), answer(CAT)]

    async def reply(number: int, _request: bytes) -> bytes:
        return responses[min(number, 2)]

    async with serving(reply) as server:
        outcome = await drive_crowd(server.url, [SAMPLE], clients=1, seconds=0.5, is_polite=True)

    assert outcome.statuses["429"] == 1
    assert outcome.correct > 2
