"""A Triton that is cut off, is full or answers nonsense, behind a gateway of two workers."""

import asyncio
import json
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from time import monotonic

import grpc
import psutil
import pytest
from tritonclient.grpc import service_pb2
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceStub

from bench.harness.triton import Triton
from tests.faults import models
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Answer, Case, ask, ask_all, encode
from tests.faults.meanwhile import every, meanwhile
from tests.faults.relay import Line
from tests.faults.serving import Gateway, serving
from tests.faults.traffic import traffic

_PATIENCE_SECONDS = 30.0
_SECONDS = 5.0
"""The gateway's deadline."""
_IMAGE = encode(models.solid(10, 20, 30), Content_Type="image/png")


@pytest.fixture(scope="module")
def gateway(triton: Triton, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway_to(triton, tmp_path_factory.mktemp("gateway")) as gateway:
        yield gateway


@contextmanager
def gateway_to(triton: Triton, folder: Path, wrapper: Sequence[str] = (), **settings: object) -> Iterator[Gateway]:
    wanted = {"model": "checksum", "timeout_seconds": _SECONDS, "log_level": "warning", **settings}
    with serving(triton, folder, settings=wanted, wrapper=wrapper) as gateway:
        yield gateway


async def until_ready(url: str) -> float:
    """Wait until an image is answered again; return the time."""
    end = monotonic() + _PATIENCE_SECONDS
    while (await ask(url, _IMAGE)).status != 200:
        assert monotonic() < end
        await asyncio.sleep(0.01)
    return monotonic()


def code_of(answer: Answer) -> str:
    """Return the code of a problem; empty for an answer that is none."""
    is_problem = answer.headers.get("content-type") == "application/problem+json"
    return str(json.loads(answer.body)["code"]) if is_problem else ""


@asynccontextmanager
async def stopped(process: psutil.Process) -> AsyncIterator[None]:
    """Stop a process (SIGSTOP) during a block."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


async def test_a_full_queue_never_opens_the_circuit(triton: Triton, tmp_path: Path) -> None:
    """Row 6: what does not fit into the model's queue is rejected at once; the gateway alone sends too few calls to fill it."""
    asked = encode(models.solid(1, 1, 1), "/predict/queue_of_4", Content_Type="image/png")
    counts: Counter[int] = Counter()
    end = monotonic() + 4 * _PATIENCE_SECONDS
    with gateway_to(triton, tmp_path, calls_in_flight=4096) as gateway:
        while counts[503] < 1000:
            assert monotonic() < end, counts
            answers = [answer for _, answer in await ask_all(gateway.url, [Case("", asked)] * 128, clients=32)]
            counts.update(answer.status for answer in answers)
            assert {code_of(answer) for answer in answers if answer.status == 503} <= {"triton_unavailable"}
            assert all("retry-after" in answer.headers for answer in answers if answer.status == 503)

        assert set(counts) <= {200, 429, 503}
        assert [line for line in gateway.log_lines() if line["event"] == "circuit opened"] == []
        assert (await ask(gateway.url, asked)).status == 200


@pytest.mark.system
@pytest.mark.parametrize("value", models.NONSENSE, ids=[text.replace(" ", "-") for text in models.NONSENSE.values()])
async def test_nonsense_is_never_an_answer(gateway: Gateway, value: int) -> None:
    """Row 9: 502, whatever is wrong, without the model's own words; the circuit stays closed."""
    asked = encode(models.solid(value, 0, 0), "/predict/nonsense?timeout_ms=20000", Content_Type="image/png")
    answers = [await ask(gateway.url, asked) for _ in range(12)]

    assert {answer.status for answer in answers} == {502}
    assert {code_of(answer) for answer in answers} <= {"invalid_model_output", "inference_failed"}
    assert not any(b"secret" in answer.body for answer in answers)


async def test_connections_that_break(triton: Triton, tmp_path: Path, record_figure: RecordFigure) -> None:
    """Row 5: a request is tried at most once more, and only some of them; the pixels of none become those of another."""
    before = await inferences(triton)
    line = Line(triton.settings.triton_address)
    await line.open()
    context = gateway_to(triton, tmp_path, triton_endpoints=f"127.0.0.1:{line.port}")
    async with meanwhile(every(0.4, line.reset)):
        gateway = await asyncio.to_thread(context.__enter__)  # the way to Triton leads through this event loop
        try:
            async with traffic(gateway.url) as counted:
                await counted.until(6000)
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)
            line.cut()
    calls = await inferences(triton) - before
    counted.record(record_figure, "broken connections", slowest=_SECONDS + 0.25)
    beside = 20  # probes, and the floor of each worker's budget
    record_figure("broken connections: inferences per request", (calls - beside) / counted.requests, 1.1)

    assert set(counted.statuses) <= {200, 503}


async def inferences(triton: Triton) -> int:
    async with grpc.aio.insecure_channel(triton.settings.triton_address) as channel:
        answer = await GRPCInferenceServiceStub(channel).ModelStatistics(service_pb2.ModelStatisticsRequest(name="checksum"))
    return int(answer.model_stats[0].inference_stats.success.count + answer.model_stats[0].inference_stats.fail.count)
