"""A client that is answered early may finish sending."""

import asyncio
from typing import Any

import pytest

from app.api.drain import drain, has_body
from tests.api.virtual_time import in_virtual_time, now
from tests.support import receiving


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, False),
        ({b"content-length": b"0"}, False),
        ({b"content-length": b"1"}, True),
        ({b"transfer-encoding": b"chunked"}, True),
        ({b"content-type": b"image/jpeg"}, False),
    ],
)
def test_a_body_is_announced_by_its_headers(headers: dict[bytes, bytes], expected: bool) -> None:  # noqa: FBT001
    """With its length, or with a transfer encoding."""
    assert has_body(headers) is expected


async def test_a_body_is_received_to_its_end() -> None:
    """Nothing is received after that."""
    messages = [{"type": "http.request", "body": b"x", "more_body": more} for more in (True, True, False)]
    receive = receiving(*messages, {"type": "http.request", "body": b"next", "more_body": False})
    await drain(receive)

    assert (await receive())["body"] == b"next"


async def test_a_client_that_disconnects_is_not_waited_for() -> None:
    """There is nothing more to receive."""
    await drain(receiving({"type": "http.request", "body": b"x", "more_body": True}))


@in_virtual_time
async def test_what_is_above_a_limit_is_not_received() -> None:
    """Its sender has to wait, and still sees the answer until the two seconds are over."""
    messages = [{"type": "http.request", "body": body, "more_body": True} for body in (bytes(2**20), b"x", b"next")]
    receive = receiving(*messages)
    await drain(receive, is_anonymous=True)

    assert now() == pytest.approx(2)
    assert (await receive())["body"] == b"next"


@pytest.mark.parametrize("pause_seconds", [0.01, 3600])
@in_virtual_time
async def test_a_body_without_an_end_is_given_up(pause_seconds: float) -> None:
    """After two seconds, whether its bytes go on arriving or not."""

    async def receive() -> Any:  # noqa: ANN401
        await asyncio.sleep(pause_seconds)
        return {"type": "http.request", "body": b"x", "more_body": True}

    await drain(receive)

    assert now() == pytest.approx(2)
