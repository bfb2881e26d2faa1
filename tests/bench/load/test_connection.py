"""Answers as they arrive on a connection."""

import pytest

from bench.load.closed_loop import drive_closed_loop
from bench.load.connection import encode_request
from bench.load.target import parse_target
from tests.bench.support import CAT, SAMPLE, always, answer, serving


async def test_a_client_may_open_a_connection_for_each_request() -> None:
    """It asks the server to close, and the next request finds another connection."""
    async with serving(always(answer(CAT, "200 OK", "Connection: close"))) as server:
        outcome = await drive_closed_loop(server.url, [SAMPLE], clients=2, seconds=30, requests=6, keep_alive=False)

    request = encode_request(parse_target(server.url), b"..", keep_alive=False)
    assert request.endswith(b"\r\nConnection: close\r\n\r\n..")
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
