"""Hostile batches: bombs, thousands of parts, streams that nobody reads to the end, and many clients with full batches."""

import asyncio
import json
from base64 import b64encode
from collections import Counter
from pathlib import Path
from time import monotonic

import httpx
import pytest
from PIL import Image

from bench.harness.triton import Triton
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Answer, Case, Connection, ask, ask_all, encode
from tests.faults.serving import Gateway, count_images, serving, unharmed
from tests.imaging.samples import encode as encode_image
from tests.processes import wait_for
from tests.scrape import Samples, scrape
from tests.support import sample_image

_CAT = sample_image("chelsea.jpg")
_STREAMS = 60
_CLIENTS = 64
_SECONDS = 6.0
_IN_USE = ("api_slots_in_use", "api_decode_queue_length", 'api_reserved_bytes{purpose="images"}')


def _batch(*images: bytes, path: str = "/detect/batch", **headers: str) -> bytes:
    made = httpx.Request("POST", "http://127.0.0.1", files=[("images", image) for image in images])
    return encode(made.read(), path, Content_Type=made.headers["content-type"], **headers)


def _codes(answer: Answer) -> Counter[str]:
    """Count the codes of the images that failed, in an answer to the whole batch."""
    assert answer.status == 200, answer.body[:500]
    return Counter(failure["problem"]["code"] for failure in json.loads(answer.body)["failures"] or ())


async def _require_free(gateway: Gateway) -> None:
    """Wait until nothing is in use that a batch needs, and single requests are answered."""
    async with httpx.AsyncClient(base_url=gateway.url) as client:

        def used(samples: Samples) -> float:
            admitted = sum(value for name, value in samples.items() if name.startswith("api_model_active_requests"))
            return admitted + sum(samples[name] for name in _IN_USE)

        async with asyncio.timeout(60):
            while used(await scrape(client)) or (await ask(gateway.url, encode(_CAT))).status != 200:  # noqa: ASYNC110 - as said
                await asyncio.sleep(0.2)


async def test_memory_is_returned_after_large_batches(null_triton: Triton, tmp_path: Path, record_figure: RecordFigure) -> None:
    """A worker that has received bodies of 120 MB is back at 1.5 times what it had within 15 s."""
    image = encode_image(Image.new("RGB", (1_000, 630)), "BMP")  # 1.9 MB
    encoded = b64encode(image).decode()
    several = json.dumps({"images": [encoded] * 48}).encode()
    requests = [_batch(*[image] * 64), encode(several, "/detect/batch", Content_Type="application/json")]
    with serving(null_triton, tmp_path) as gateway:
        await ask_all(gateway.url, [Case("", encode(_CAT))] * 200)
        before = gateway.rss()
        answers = await ask_all(gateway.url, [Case("", request) for request in requests * 3], clients=2)
        peak, started = gateway.rss(), monotonic()
        await asyncio.to_thread(wait_for, lambda: gateway.rss() <= 1.5 * before)
        seconds = monotonic() - started

    record_figure("large batches: memory in the end, MiB", peak / 2**20)
    record_figure("large batches: memory is at 1.5 times that of before, after, s", seconds, 15)
    assert {answer.status for _, answer in answers} == {200}


async def test_streams_that_are_abandoned(null_triton: Triton, gateway: Gateway) -> None:
    """What has not begun never does: a model of 20 ms an image does not see most of the images."""
    request = _batch(*[_CAT] * 64, path="/detect/batch?model=wait_20", Accept="application/x-ndjson")
    lines, seen = len(gateway.log_lines()), await count_images(null_triton, "wait_20")
    with unharmed(gateway, growth_mb=100):  # the first images touch the workers' arenas, 39 MiB each
        for _ in range(_STREAMS // 10):
            connections = [await Connection.open(gateway.url) for _ in range(10)]
            for connection in connections:
                await connection.send(request)
            await asyncio.sleep(0.5)  # some have begun
            for connection in connections:
                connection.abort()
        await _require_free(gateway)
    logged = [line for line in gateway.log_lines()[lines:] if line.get("route") == "/detect/batch"]
    assert len(logged) == _STREAMS
    assert {line["status"] for line in logged} <= {200, 429, 499}
    assert any(line["status"] == 499 for line in logged)
    assert await count_images(null_triton, "wait_20") - seen < _STREAMS * 64 / 2


@pytest.mark.system
async def test_streams_that_are_not_read(gateway: Gateway) -> None:
    request = _batch(*[_CAT] * 64, path="/detect/batch?confidence=0", Accept="application/x-ndjson")
    connections = [await Connection.open(gateway.url) for _ in range(10)]
    with unharmed(gateway):
        for connection in connections:
            connection.stop_reading()
            await connection.send(request)
        await _require_free(gateway)
        for connection in connections:
            connection.abort()


async def test_many_clients_with_batches_leave_room_for_single_requests(
    null_triton: Triton, tmp_path: Path, record_figure: RecordFigure
) -> None:
    """Single requests are answered all the time; of the batches some are rejected as a whole, or images of them in their place."""
    request = _batch(*[_CAT] * 64, path="/detect/batch?model=wait_20")
    single = encode(_CAT, "/predict/wait_20")
    batches: Counter[int] = Counter()
    singles: Counter[int] = Counter()
    problems: Counter[str] = Counter()
    loop = asyncio.get_running_loop()

    with serving(null_triton, tmp_path) as gateway, unharmed(gateway, growth_mb=200):
        end = loop.time() + _SECONDS

        async def send_batches() -> None:
            while loop.time() < end:
                answer = await ask(gateway.url, request)
                batches[answer.status] += 1
                if answer.status == 200:
                    problems.update(_codes(answer))
                else:
                    await asyncio.sleep(0.5)

        async def send_singles() -> None:
            while loop.time() < end:
                singles[(await ask(gateway.url, single)).status] += 1

        await asyncio.gather(*(send_batches() for _ in range(_CLIENTS)), *(send_singles() for _ in range(4)))
        await _require_free(gateway)

    record_figure("64 clients with batches: share of the single requests that were answered", singles[200] / singles.total())
    assert set(batches) <= {200, 429}
    assert batches[200]
    assert set(problems) <= {"gateway_full", "deadline_passed"}
    assert set(singles) <= {200, 429}
    assert singles[200] > 0.8 * singles.total()
