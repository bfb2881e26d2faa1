"""Bodies above the limit, declared or not: rejected at once, or where the limit is reached."""

import asyncio
import json
from pathlib import Path

import pytest

from tests.faults.conftest import RecordFigure
from tests.faults.exchange import NO_ANSWER, Connection, ask
from tests.faults.serving import Gateway, unharmed
from tests.nginx import proxying
from tests.support import eventually

_LIMIT = 50 * 2**20
_CHUNK = b"10000\r\n" + bytes(65_536) + b"\r\n"
_UPLOADS = 4
_BUFFERS = 16 * 2**20
"""What the kernel may hold beside the limit, and what is read after the answer so that the client gets it."""
_HEAD = b"POST /detect HTTP/1.1\r\nHost: nereid\r\n"
FRAMINGS = {
    "negative length": b"Content-Length: -5\r\n\r\nxxxxx",
    "length that is no number": b"Content-Length: 5x\r\n\r\nxxxxx",
    "two lengths": b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxxx",
    "length and chunks": b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "two encodings": b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    "chunk size that is no number": b"Transfer-Encoding: chunked\r\n\r\nzz\r\nxx\r\n0\r\n\r\n",
    "chunk size of 17 digits": b"Transfer-Encoding: chunked\r\n\r\n11111111111111111\r\nxx\r\n0\r\n\r\n",
    "chunk longer than its size": b"Transfer-Encoding: chunked\r\n\r\n1\r\nxxxx\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("expect", ["", "Expect: 100-continue\r\n"])
async def test_a_declared_length_above_the_limit(gateway: Gateway, expect: str, record_figure: RecordFigure) -> None:
    """Row 23: the answer is 413 before any of the body is read, within 20 ms."""
    request = _HEAD + f"{expect}Content-Length: 99999999\r\n\r\n".encode()

    with unharmed(gateway, growth_mb=2):
        answers = [await ask(gateway.url, request) for _ in range(5)]

    assert {(answer.status, json.loads(answer.body)["code"]) for answer in answers} == {(413, "body_too_large")}
    fastest = min(answer.seconds for answer in answers)
    record_figure(f"declared length above the limit{', ' + expect.strip() if expect else ''}: answered in, ms", fastest * 1e3, 20)


async def test_a_body_without_end(gateway: Gateway, record_figure: RecordFigure) -> None:
    """Row 24: the answer is 413 when the limit is reached, and the workers never hold more than it for each client."""
    before = peak = gateway.rss()
    sent = []

    async def upload() -> None:
        nonlocal peak
        async with await Connection.open(gateway.url) as connection:
            answering = asyncio.ensure_future(connection.receive())
            await connection.send(_HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
            chunks = 0
            while not answering.done():
                await connection.send(_CHUNK)
                await asyncio.sleep(0)  # or else the answer would not be noticed
                chunks += 1
                if chunks % 64 == 0:
                    peak = max(peak, gateway.rss())
            sent.append(chunks * 65_536)
            assert (await answering).status == 413

    with unharmed(gateway, growth_mb=50):
        await asyncio.gather(*(upload() for _ in range(_UPLOADS)))

    record_figure("endless body: sent until the answer, MiB", max(sent) / 2**20, (_LIMIT + _BUFFERS) / 2**20)
    record_figure(
        f"{_UPLOADS} endless bodies: memory growth at the peak, MiB",
        (peak - before) / 2**20,
        _UPLOADS * (_LIMIT + _BUFFERS) / 2**20,
    )


@pytest.mark.system
@pytest.mark.parametrize("name", FRAMINGS)
async def test_unclear_framing_is_rejected(gateway: Gateway, name: str) -> None:
    """Row 25: a request whose length is not clear has no image, whichever way it is read."""
    with unharmed(gateway):
        answer = await ask(gateway.url, _HEAD + FRAMINGS[name])

    assert answer.status in {400, 415, NO_ANSWER}


@pytest.mark.system
async def test_nginx_passes_no_unclear_framing_on(gateway: Gateway, tmp_path: Path) -> None:
    """Row 25: NGINX rejects such a request by itself, so that it and the gateway cannot disagree about where it ends."""
    head = _HEAD + b"X-Request-ID: unclear-framing\r\n"
    with proxying([gateway.address], tmp_path) as proxy:
        answers = [await ask(proxy.local_url, head + framing) for framing in FRAMINGS.values()]

    assert {answer.status for answer in answers} <= {400, 501}
    assert "unclear-framing" not in gateway.log.read_text(encoding="utf-8")


def request_bytes(gateway: Gateway, request_id: str) -> list[int]:
    """Return what the log says of a request, once its line has been written."""
    return [line["request_bytes"] for line in gateway.log_lines() if line.get("request_id") == request_id]


@pytest.mark.system
async def test_granian_prefers_chunks_to_a_length(gateway: Gateway) -> None:
    """It could reject the request; instead it closes the connection, so that nothing behind it is taken for another one."""
    framing = b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n"
    answer = await ask(gateway.url, _HEAD + b"X-Request-ID: chunks-and-length\r\n" + framing)

    assert (answer.status, answer.headers["connection"]) == (415, "close")
    await eventually(lambda: request_bytes(gateway, "chunks-and-length") == [3])
