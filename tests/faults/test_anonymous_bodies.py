"""Clients that may send their API key in the body, and do not: they hold nothing of those that have one in a header."""

import asyncio
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection as PipeEnd
from pathlib import Path
from random import Random
from typing import NamedTuple

import pytest

from bench.harness.processes import ROOT
from bench.harness.triton import Triton
from tests.api.conftest import write_keys
from tests.fakes.models import scene
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Connection, encode
from tests.faults.serving import serving, unharmed

SECRET = "not-a-secret"  # noqa: S105 - it protects nothing
_CALLERS = 8
_PAUSE_SECONDS = 0.1
_SECONDS = 10.0
_ROUNDS = 2
_AGAIN_SECONDS = 10.0
_HOLD_SECONDS = 2.0
_PIECE_BYTES = 1 << 18
_HEAD = b"POST /infer/object_detection HTTP/1.1\r\nHost: nereid\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
_SILENT = [_HEAD % 1000 + b"{"] * 2_100
_LARGE = [_HEAD % (46 * 2**20) + b'{"image": "' + bytes(45 * 2**20)] * 19
_REJECTION = b"HTTP/1.1 429 Too Many Requests\r\nContent-Length: 0\r\n\r\n"


class Calls(NamedTuple):
    statuses: Counter[int]
    seconds: list[float]

    @property
    def p99(self) -> float:
        """Return the 99th percentile of the time to an answer, seconds."""
        return sorted(self.seconds)[int(len(self.seconds) * 0.99)]


async def call(url: str, seconds: float, calls: Calls) -> None:
    """Send images with a key, at a rate that the gateway could exceed by far."""
    request = encode(scene("JPEG"), Content_Type="image/jpeg", X_API_Key=f"camera.{SECRET}")

    async def run() -> None:
        async with asyncio.timeout(2 * seconds), await Connection.open(url) as connection:
            for _ in range(int(seconds / _PAUSE_SECONDS)):
                answer = await connection.ask(request)
                calls.statuses[answer.status] += 1
                calls.seconds.append(answer.seconds)
                await asyncio.sleep(_PAUSE_SECONDS)

    await asyncio.gather(*(run() for _ in range(_CALLERS)))


@contextmanager
def attackers(statuses: Counter[int]) -> Iterator[Callable[[str], None]]:
    """Send requests that do not end, during a block, from a process that leaves the CPU to others, as another machine would.

    Yields what aims them at another server, and waits until all do that; with no URL, at a bystander in their own process. What
    the attackers themselves take from the machine is the same then: only the gateway is not attacked.

    Args:
        statuses: Gets those that the gateway has answered.
    """
    ours, theirs = Pipe()
    # A process of multiprocessing's would leave another one behind, which tracks resources.
    command = f"from {__name__} import attack; attack({theirs.fileno()})"
    process = subprocess.Popen([sys.executable, "-c", command], cwd=ROOT, pass_fds=[theirs.fileno()])

    def aim(url: str) -> None:
        ours.send(url)
        assert ours.recv() == url

    try:
        yield aim
        ours.send(None)
        statuses.update(ours.recv())
    finally:
        process.kill()
        process.wait()


def attack(end_of_pipe: int) -> None:
    parent = PipeEnd(end_of_pipe)
    os.nice(19)
    parent.send(asyncio.run(_insist_until_enough(parent)))


async def _insist_until_enough(parent: PipeEnd) -> Counter[int]:
    """Send each request again some seconds after its answer, until the parent says that it is enough; count the statuses."""
    random = Random(4603)  # noqa: S311 - so that not all of them send at the same time
    bystander = await asyncio.start_server(_reject, "127.0.0.1", 0)
    quiet = target = f"http://127.0.0.1:{bystander.sockets[0].getsockname()[1]}"
    statuses: Counter[int] = Counter()

    async def insist(request: bytes) -> None:
        while True:
            await asyncio.sleep(random.uniform(0, _AGAIN_SECONDS))
            url = target
            with suppress(ConnectionError):
                status = await _send(url, request)
                if url != quiet:
                    statuses[status] += 1

    tasks = [asyncio.create_task(insist(request)) for request in (*_SILENT, *_LARGE)]
    while (url := await asyncio.to_thread(parent.recv)) is not None:
        target = url or quiet
        await asyncio.sleep(_AGAIN_SECONDS + _HOLD_SECONDS)
        parent.send(url)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return statuses


async def _send(url: str, request: bytes) -> int:
    """Send a request until it is answered, in pieces: a copy of all would take the CPU from others. Return the status."""
    async with await Connection.open(url) as connection:
        answering = asyncio.create_task(connection.receive())
        with suppress(ConnectionError):
            for start in range(0, len(request), _PIECE_BYTES):
                if not answering.done():
                    await connection.send(request[start : start + _PIECE_BYTES])
        return (await answering).status


async def _reject(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Answer 429 as late as a gateway that is attacked, and read no body."""
    with suppress(ConnectionError, asyncio.IncompleteReadError):
        await reader.readuntil(b"\r\n\r\n")
        await asyncio.sleep(_HOLD_SECONDS)
        writer.write(_REJECTION)
    writer.close()


@pytest.mark.timeout(240)  # attackers start, and stop, for 12 s each time
async def test_callers_with_a_key_do_not_notice_those_without(
    null_triton: Triton, tmp_path: Path, record_figure: RecordFigure
) -> None:
    """In turns with a bystander, so that whatever else this machine does counts on both sides."""
    keys = write_keys(tmp_path, ("camera", SECRET, "detect"))
    quiet, busy, statuses = Calls(Counter(), []), Calls(Counter(), []), Counter[int]()
    with serving(null_triton, tmp_path, settings={"api_keys_file": keys}) as gateway:
        await call(gateway.url, 2, Calls(Counter(), []))
        with unharmed(gateway, growth_mb=100), attackers(statuses) as aim:
            for url, calls in [("", quiet), (gateway.url, busy)] * _ROUNDS:
                await asyncio.to_thread(aim, url)
                cpu = gateway.cpu_seconds()
                await call(gateway.url, _SECONDS, calls)
                name = "attacked" if url else "quiet"
                record_figure(f"workers, {name}: cores in use", (gateway.cpu_seconds() - cpu) / _SECONDS)

    record_figure("callers with a key: p99 while nobody attacks, ms", quiet.p99 * 1e3)
    record_figure("callers with a key: p99 while others hold bodies, ms", busy.p99 * 1e3, quiet.p99 * 1.2e3)
    assert set(quiet.statuses) == set(busy.statuses) == {200}
    assert set(statuses) == {408, 429}
