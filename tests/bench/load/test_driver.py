"""What every kind of load does when a server misbehaves."""

import asyncio

import pytest

from bench.load.closed_loop import drive_closed_loop
from tests.bench.support import CAT, SAMPLE, always, answer, serving, silent


async def test_broken_connections_are_errors_and_opened_again() -> None:
    async def reply(number: int, _request: bytes) -> bytes | None:
        return None if number % 4 == 1 else answer(CAT)

    async with serving(reply) as server:
        outcome = await drive_closed_loop(server.url, [SAMPLE], clients=1, seconds=30, requests=8)

    assert outcome.statuses == {"200": 6, "error": 2}
    assert server.connections >= 3


async def test_an_answer_is_not_awaited_for_ever() -> None:
    never = asyncio.Event()
    async with serving(silent(never)) as server:
        outcome = await drive_closed_loop(server.url, [SAMPLE], clients=1, seconds=30, requests=1, patience=0.1)
        never.set()

    assert outcome.statuses == {"error": 1}
    assert outcome.max >= 100


async def test_a_load_without_images_or_connections_is_an_error_of_the_caller() -> None:
    async with serving(always(answer(CAT))) as server:
        url = server.url
        with pytest.raises(ValueError, match="nothing to send"):
            await drive_closed_loop(url, [], clients=1, seconds=1)
        with pytest.raises(ValueError, match="nothing to send"):
            await drive_closed_loop(url, [SAMPLE], clients=0, seconds=1)
    with pytest.raises(ConnectionRefusedError):
        await drive_closed_loop(url, [SAMPLE], clients=2, seconds=1)
