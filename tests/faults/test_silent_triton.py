"""A Triton that answers nothing is told as such by all workers, however many callers there are and however patient they are."""

import asyncio
import math
from collections.abc import Iterator
from time import monotonic
from typing import NamedTuple

import pytest

from bench.harness.triton import Triton
from tests.faults import models
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Connection, ask, encode
from tests.faults.serving import Gateway
from tests.faults.test_failing_triton import code_of, gateway_to, stopped, until_ready

_CALLERS, _DEADLINES, _WORKERS = (1, 4, 16), (0.6, 2.0, 5.0), (1, 4, 16)
_SECONDS, _LATEST_SECONDS = 12.0, 10.0
"""How long Triton is stopped, and after how much of that everybody must be told."""
_FAILURES = 6
_REJECTION_SECONDS, _BACK_SECONDS = 0.05, 2.0
_PATIENCE_SECONDS = 60.0
_PAUSE_SECONDS = 0.1
"""Of a caller that was rejected."""


class Told(NamedTuple):
    asked_at: float
    """Seconds after Triton was stopped."""
    seconds: float
    status: int
    code: str


@pytest.fixture(scope="module", params=_WORKERS)
def gateway(request: pytest.FixtureRequest, triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway_to(triton, tmp_path_factory.mktemp("gateway"), workers=request.param) as gateway:
        yield gateway


async def until_all_work(gateway: Gateway) -> None:
    """Wait until each worker has finished its start, and no circuit is open any more."""
    wanted = f"api_workers {len(gateway.workers()):.1f}\n", 'api_circuit_open{model="checksum"} 0.0\n'
    end = monotonic() + _PATIENCE_SECONDS
    while True:
        shown = (await ask(gateway.url, encode(b"", "/metrics", "GET"))).body.decode()
        if all(line in shown for line in wanted):
            return
        assert monotonic() < end
        await asyncio.sleep(0.1)


async def ask_until(url: str, deadline: float, start: float, end: float) -> list[Told]:
    """Ask again and again, over a new connection each time, so that any worker may get it."""
    request = encode(models.solid(10, 20, 30), f"/detect?timeout_ms={deadline * 1e3:.0f}", Content_Type="image/png")
    told = []
    while monotonic() < end:
        async with await Connection.open(url) as connection:
            asked_at = monotonic()
            answer = await connection.ask(request)
        told.append(Told(asked_at - start, answer.seconds, answer.status, code_of(answer)))
        if answer.status != 504:
            await asyncio.sleep(_PAUSE_SECONDS)
    return told


@pytest.mark.parametrize("deadline", _DEADLINES)
@pytest.mark.parametrize("callers", _CALLERS)
async def test_callers_of_a_silent_triton_get_503_soon(
    triton: Triton, gateway: Gateway, callers: int, deadline: float, record_figure: RecordFigure
) -> None:
    """After the sixth failure, or ten seconds, everybody gets 503 at once; nobody is told that the gateway is full."""
    await until_ready(gateway.url)
    await until_all_work(gateway)
    async with stopped(triton.process):
        start = monotonic()
        asking = (ask_until(gateway.url, deadline, start, start + _SECONDS) for _ in range(callers))
        told = [one for by_caller in await asyncio.gather(*asking) for one in by_caller]
    continued = monotonic()
    back = await until_ready(gateway.url) - continued
    failed_at = sorted(one.asked_at + one.seconds for one in told if one.status == 504)
    told_from = min([*failed_at[_FAILURES - 1 : _FAILURES], _LATEST_SECONDS])
    late = [one for one in told if one.asked_at > told_from]
    full = sum(one.status == 429 and one.asked_at > failed_at[0] for one in told)  # before, it may be that there are too many
    rejected = sorted(one.seconds for one in told if one.status == 503)
    slow = rejected[int(len(rejected) * 0.9)] if rejected else math.inf
    first = min((one.asked_at for one in told if one.status == 503), default=math.inf)
    label = f"SIGSTOP, {len(gateway.workers())} workers, {callers} callers of {deadline} s"
    record_figure(f"{label}: 429 after the first 504", full, 0)
    record_figure(f"{label}: first 503 after, s", first)
    record_figure(f"{label}: 503, p90, ms", slow * 1e3, _REJECTION_SECONDS * 1e3)
    record_figure(f"{label}: first 200 after SIGCONT, s", back, _BACK_SECONDS)

    assert {one.status for one in told} <= {429, 503, 504}
    assert late
    assert [one for one in late if one.code != "circuit_open"] == []
