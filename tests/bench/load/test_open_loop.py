"""A constant rate of requests, against a server on a real socket."""

import asyncio

import pytest

from bench.load.closed_loop import drive_closed_loop
from bench.load.open_loop import drive_open_loop
from bench.load.outcome import Outcome
from tests.bench.support import CAT, SAMPLE, always, answer, serving


@pytest.mark.faults
@pytest.mark.parametrize("is_constant", [True, False], ids=["constant", "closed"])
async def test_only_a_constant_rate_shows_how_many_requests_a_stall_delays(is_constant: bool) -> None:  # noqa: FBT001
    """Clients that wait stop asking while the server stalls; at a constant rate all requests due meanwhile are late."""
    stalled = asyncio.Event()
    loop = asyncio.get_running_loop()

    async def reply(number: int, _request: bytes) -> bytes:
        if number == 10:
            loop.call_later(0.5, stalled.set)
        if number >= 10:
            await stalled.wait()
        return answer(CAT)

    async with serving(reply) as server:
        if is_constant:
            outcome = await drive_open_loop(server.url, [SAMPLE], rate=100, seconds=1, connections=2)
        else:
            outcome = await drive_closed_loop(server.url, [SAMPLE], clients=2, seconds=30, requests=100)

    assert outcome.requests == outcome.correct == 100
    late = _count_above(outcome, 250)  # half of the 50 that are due during the stall, however fast the answers come afterwards
    assert (late >= 20) == is_constant
    assert late >= 1


def _count_above(outcome: Outcome, milliseconds: float) -> int:
    counted = outcome.histogram.get_recorded_iterator()
    return sum(item.count_at_value_iterated_to for item in counted if item.value_iterated_to > milliseconds * 1e3)


async def test_all_requests_that_are_due_are_sent() -> None:
    busy = most = 0
    all_busy = asyncio.Event()

    async def reply(_number: int, _request: bytes) -> bytes:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        if busy == 3:
            all_busy.set()
        await all_busy.wait()
        busy -= 1
        return answer(CAT)

    async with serving(reply) as server:
        outcome = await drive_open_loop(server.url, [SAMPLE], rate=400, seconds=0.25, connections=3)

    assert outcome.statuses == {"200": 100}
    assert most == 3
    assert server.connections == 3


async def test_requests_that_were_due_but_could_not_be_sent_are_errors() -> None:
    async with serving(always(None)) as server:
        outcome = await drive_open_loop(server.url, [SAMPLE], rate=200, seconds=0.2, connections=2, patience=0.2)

    assert outcome.statuses == {"error": 40}
