"""Answers as they arrive on a connection."""

import pytest

from bench.load.closed_loop import drive_closed_loop
from tests.bench.support import CAT, SAMPLE, always, answer, serving


async def test_connection_that_the_server_closes_is_replaced() -> None:
    async with serving(always(answer(CAT, "200 OK", "Connection: close"))) as server:
        outcome = await drive_closed_loop(server.url, [SAMPLE], clients=2, seconds=30, requests=6)

    assert outcome.statuses == {"200": 6}
    assert server.connections >= 6


@pytest.mark.parametrize(
    "response",
    [b"HTTP/1.1 200 OK\r\n\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: x\r\n\r\n", b"SSH-2.0\r\ncontent-length: 1\r\n\r\nx"],
    ids=["no length", "no number", "no HTTP"],
)
async def test_answers_that_cannot_be_read_are_errors(response: bytes) -> None:
    """An answer without a valid length, or that is not HTTP/1.1, ends the connection."""
    async with serving(always(response)) as server:
        outcome = await drive_closed_loop(server.url, [SAMPLE], clients=1, seconds=30, requests=2)

    assert outcome.statuses == {"error": 2}
