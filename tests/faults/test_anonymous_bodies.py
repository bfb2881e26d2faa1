"""Clients that may send their API key in the body, and do not: they hold nothing of those that have one in a header."""

import asyncio
import multiprocessing
import os
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any, NamedTuple

from bench.harness.triton import Triton
from tests.api.conftest import write_keys
from tests.fakes.models import scene
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Connection, encode
from tests.faults.serving import serving, unharmed

SECRET = "not-a-secret"  # noqa: S105 - it protects nothing
_CALLERS = 8
_PAUSE_SECONDS = 0.1
_SECONDS = 20.0
_AGAIN_SECONDS = 10.0
_HEAD = b"POST /infer/object_detection HTTP/1.1\r\nHost: nereid\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_SILENT = [_HEAD % 1000 + b"{"] * 2_100
_LARGE = [_HEAD % (46 * 2**20) + b'{"image": "' + bytes(45 * 2**20)] * 19


class Calls(NamedTuple):
    statuses: Counter[int]
    seconds: list[float]

    @property
    def p99(self) -> float:
        """Return the 99th percentile of the time to an answer, seconds."""
        return sorted(self.seconds)[int(len(self.seconds) * 0.99)]


async def call(url: str, seconds: float) -> Calls:
    """Send images with a key, at a rate that the gateway could exceed by far."""
    request = encode(scene("JPEG"), Content_Type="image/jpeg", X_API_Key=f"camera.{SECRET}")
    calls = Calls(Counter(), [])

    async def run() -> None:
        async with asyncio.timeout(2 * seconds), await Connection.open(url) as connection:
            for _ in range(int(seconds / _PAUSE_SECONDS)):
                answer = await connection.ask(request)
                calls.statuses[answer.status] += 1
                calls.seconds.append(answer.seconds)
                await asyncio.sleep(_PAUSE_SECONDS)

    await asyncio.gather(*(run() for _ in range(_CALLERS)))
    return calls


@contextmanager
def attacked(url: str, statuses: Counter[int]) -> Iterator[None]:
    """Send requests that do not end, during a block, from a process that leaves the CPU to others, as another machine would."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_attack, args=(url, theirs))
    process.start()
    assert ours.recv() == "begun"
    try:
        yield
        ours.send("end")
        statuses.update(ours.recv())
    finally:
        process.kill()
        process.join()


def _attack(url: str, parent: Any) -> None:  # noqa: ANN401 - an end of a pipe
    os.nice(19)
    parent.send(asyncio.run(_insist_until(url, parent)))


async def _insist_until(url: str, parent: Any) -> Counter[int]:  # noqa: ANN401 - as above
    """Send each request again some seconds after its answer, until the parent says that it is enough; count the statuses."""
    random = Random(4603)  # noqa: S311 - so that not all of them send at the same time
    statuses: Counter[int] = Counter()

    async def insist(request: bytes) -> None:
        while True:
            await asyncio.sleep(random.uniform(0, _AGAIN_SECONDS))
            with suppress(ConnectionError):
                async with await Connection.open(url) as connection:
                    statuses[(await connection.ask(request)).status] += 1

    tasks = [asyncio.create_task(insist(request)) for request in (*_SILENT, *_LARGE)]
    await asyncio.sleep(_AGAIN_SECONDS)
    parent.send("begun")
    await asyncio.to_thread(parent.recv)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return statuses


async def test_callers_with_a_key_do_not_notice_those_without(
    null_triton: Triton, tmp_path: Path, record_figure: RecordFigure
) -> None:
    """Neither thousands of connections that send one byte, nor bodies that would fill the memory, take anything from them."""
    keys = write_keys(tmp_path, ("camera", SECRET, "detect"))
    with serving(null_triton, tmp_path, settings={"api_keys_file": keys}) as gateway:
        await call(gateway.url, 2)
        quiet = await call(gateway.url, _SECONDS)
        statuses: Counter[int] = Counter()
        with unharmed(gateway, growth_mb=100), attacked(gateway.url, statuses):
            busy = await call(gateway.url, _SECONDS)

    record_figure("callers with a key: p99 while nobody attacks, ms", quiet.p99 * 1e3)
    record_figure("callers with a key: p99 while others hold bodies, ms", busy.p99 * 1e3, quiet.p99 * 1.2e3)
    for status, count in statuses.items():
        record_figure(f"bodies without a key: answered {status}", count)
    assert set(quiet.statuses) == set(busy.statuses) == {200}
    assert set(statuses) == {408, 429}
    assert busy.p99 <= 1.2 * quiet.p99
