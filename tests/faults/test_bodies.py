"""Bodies that are too long, unclear, damaged or whole batches: rejected where they must be, and others are answered."""

import asyncio
import base64
import json
from pathlib import Path
from random import Random
from time import monotonic

import httpx
import pytest
from PIL import Image

from bench.harness.triton import Triton
from tests.fakes.models import scene
from tests.faults import corpus
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import NO_ANSWER, Case, Connection, ask, ask_all, encode
from tests.faults.serving import Gateway, count_images, serving, unharmed
from tests.imaging.samples import encode as encode_image
from tests.nginx import proxying
from tests.processes import wait_for
from tests.scrape import Samples, scrape
from tests.support import sample_image

_CAT = sample_image("chelsea.jpg")
_LIMIT = 50 * 2**20
_CHUNK = b"10000\r\n" + bytes(65_536) + b"\r\n"
_UPLOADS = 4
_BUFFERS = 16 * 2**20
"""What the kernel may hold beside the limit, and what is read after the answer so that the client gets it."""
_HEAD = b"POST /detect HTTP/1.1\r\nHost: nereid\r\n"
_CHUNKED = b"Transfer-Encoding: chunked\r\n"
FRAMINGS = [
    b"Content-Length: -5\r\n\r\nxxxxx",
    b"Content-Length: 5x\r\n\r\nxxxxx",
    b"Content-Length: 5\r\nContent-Length: 6\r\n\r\nxxxxxx",
    b"Content-Length: 5\r\n" + _CHUNKED + b"\r\n0\r\n\r\n",
    b"Transfer-Encoding: chunked, identity\r\n\r\n0\r\n\r\n",
    _CHUNKED + b"\r\nzz\r\nxx\r\n0\r\n\r\n",
    _CHUNKED + b"\r\n11111111111111111\r\nxx\r\n0\r\n\r\n",
    _CHUNKED + b"\r\n1\r\nxxxx\r\n0\r\n\r\n",
]
_FORM = "multipart/form-data; boundary=limit"
_IMAGE = scene("PNG")


async def test_body_without_end_is_rejected_at_the_limit(gateway: Gateway, record_figure: RecordFigure) -> None:
    before = peak = gateway.rss()
    sent = []

    async def upload() -> None:
        nonlocal peak
        async with await Connection.open(gateway.url) as connection:
            answering = asyncio.ensure_future(connection.receive())
            await connection.send(_HEAD + _CHUNKED + b"\r\n")
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

    limit = (_LIMIT + _BUFFERS) / 2**20
    record_figure("endless body: sent until the answer, MiB", max(sent) / 2**20, limit)
    record_figure(f"{_UPLOADS} endless bodies: memory at the peak, MiB", (peak - before) / 2**20, _UPLOADS * limit)


@pytest.mark.system
async def test_unclear_framing_is_rejected_and_nginx_passes_none_on(gateway: Gateway, tmp_path: Path) -> None:
    """So that it and the gateway cannot disagree about where a request ends."""
    head = _HEAD + b"X-Request-ID: unclear-framing\r\n"
    with unharmed(gateway):
        own = [await ask(gateway.url, _HEAD + framing) for framing in FRAMINGS]
    with proxying([gateway.address], tmp_path) as proxy:
        answers = [await ask(proxy.local_url, head + framing) for framing in FRAMINGS]

    assert {answer.status for answer in own} <= {400, 415, NO_ANSWER}
    assert {answer.status for answer in answers} <= {400, 501}
    assert "unclear-framing" not in gateway.log.read_text(encoding="utf-8")


@pytest.mark.system
async def test_granian_prefers_chunks_to_a_length(gateway: Gateway) -> None:
    """It could reject the request; instead it closes the connection, so that nothing behind it is taken for another one."""
    framing = b"X-Request-ID: both\r\nContent-Length: 5\r\n" + _CHUNKED + b"\r\n3\r\nabc\r\n0\r\n\r\n"
    answer = await ask(gateway.url, _HEAD + framing)

    assert (answer.status, answer.headers["connection"]) == (415, "close")
    line = await asyncio.to_thread(gateway.wait_for_line, "both")
    assert line["request_bytes"] == 3


def _part(disposition: str, content: bytes, *headers: str) -> bytes:
    head = "\r\n".join(["--limit", f"Content-Disposition: form-data{disposition}", *headers, "", ""])
    return head.encode("latin-1") + content + b"\r\n"


_FILE = _part('; name="image"; filename="scene.png"', _IMAGE, "Content-Type: image/png")
_END = b"--limit--\r\n"
_BASE64 = base64.b64encode(_IMAGE)
ACCEPTED_FORMS = [
    _part('; name="confidence"', b"0.5") + _FILE + _END,
    _FILE.replace(b'"image"', b'"file"') + _END,
    _FILE.replace(b"scene.png", b"../../../etc/passwd") + _END,
    _FILE.replace(b"scene.png", b"%0d%0aX-Canary: 1") + _END,
    _part('; name="image"', _BASE64, "Content-Transfer-Encoding: base64") + _END,
    b"preamble\r\n" + _FILE + _END + b"epilogue",
]


@pytest.mark.system
async def test_damaged_bodies_do_no_harm(gateway: Gateway) -> None:
    random = Random(4604)  # noqa: S311 - the same bodies in each run
    valid = [(_FORM, body) for body in ACCEPTED_FORMS]
    valid += [("application/json", json.dumps({"image": _BASE64.decode(), "classes": ["nothing", 0]}).encode())] * 4
    damaged = [encode(corpus.damage(body, random), Content_Type=declared) for declared, body in valid * 100]

    with unharmed(gateway):
        usable = await ask_all(gateway.url, [Case("", encode(body, Content_Type=_FORM)) for body in ACCEPTED_FORMS])
        answers = await ask_all(gateway.url, [Case("", request) for request in damaged])

    assert {answer.status for _, answer in usable} == {200}
    assert {answer.status for _, answer in answers} <= {200, 400, 404, 413, 415, 422}


def _batch(*images: bytes, path: str = "/detect/batch", **headers: str) -> bytes:
    made = httpx.Request("POST", "http://127.0.0.1", files=[("images", image) for image in images])
    return encode(made.read(), path, Content_Type=made.headers["content-type"], **headers)


async def _require_free(gateway: Gateway) -> None:
    """Wait until nothing is in use that a batch needs, and single requests are answered."""
    in_use = "api_model_active_requests", "api_slots_in_use", "api_decode_queue_length", 'api_reserved_bytes{purpose="images"}'
    async with httpx.AsyncClient(base_url=gateway.url) as client:

        def used(samples: Samples) -> float:
            return sum(value for name, value in samples.items() if name.startswith(in_use))

        async with asyncio.timeout(60):
            while used(await scrape(client)) or (await ask(gateway.url, encode(_CAT))).status != 200:  # noqa: ASYNC110 - as said
                await asyncio.sleep(0.2)


async def test_memory_is_returned_after_large_batches(null_triton: Triton, tmp_path: Path, record_figure: RecordFigure) -> None:
    """A worker that has received bodies of 120 MB is back at 1.5 times what it had within 15 s."""
    image = encode_image(Image.new("RGB", (1_000, 630)), "BMP")  # 1.9 MB
    several = json.dumps({"images": [base64.b64encode(image).decode()] * 48}).encode()
    requests = [_batch(*[image] * 64), encode(several, "/detect/batch", Content_Type="application/json")]
    with serving(null_triton, tmp_path) as gateway:
        await ask_all(gateway.url, [Case("", encode(_CAT))] * 200)
        before = gateway.rss()
        answers = await ask_all(gateway.url, [Case("", request) for request in requests * 3], clients=2)
        started = monotonic()
        await asyncio.to_thread(wait_for, lambda: gateway.rss() <= 1.5 * before)

    record_figure("large batches: memory is at 1.5 times that of before, after, s", monotonic() - started, 15)
    assert {answer.status for _, answer in answers} == {200}


async def test_streams_that_are_abandoned_do_not_begin(null_triton: Triton, gateway: Gateway) -> None:
    """A model of 20 ms an image does not see most of the images."""
    request = _batch(*[_CAT] * 64, path="/detect/batch?model=wait_20", Accept="application/x-ndjson")
    lines, seen, streams = len(gateway.log_lines()), await count_images(null_triton, "wait_20"), 60
    with unharmed(gateway, growth_mb=100):  # the first images touch the workers' arenas, 39 MiB each
        for _ in range(streams // 10):
            connections = [await Connection.open(gateway.url) for _ in range(10)]
            for connection in connections:
                await connection.send(request)
            await asyncio.sleep(0.5)  # some have begun
            for connection in connections:
                connection.abort()
        await _require_free(gateway)
    logged = [line for line in gateway.log_lines()[lines:] if line.get("route") == "/detect/batch"]
    assert len(logged) == streams
    assert {499} <= {line["status"] for line in logged} <= {200, 429, 499}
    assert await count_images(null_triton, "wait_20") - seen < streams * 64 / 2


@pytest.mark.system
async def test_streams_that_are_not_read_hold_nothing(gateway: Gateway) -> None:
    request = _batch(*[_CAT] * 64, path="/detect/batch?confidence=0", Accept="application/x-ndjson")
    connections = [await Connection.open(gateway.url) for _ in range(10)]
    with unharmed(gateway):
        for connection in connections:
            connection.stop_reading()
            await connection.send(request)
        await _require_free(gateway)
        for connection in connections:
            connection.abort()
