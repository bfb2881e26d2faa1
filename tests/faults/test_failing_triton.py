"""A Triton that hangs, is cut off, forgets, is full or answers nonsense, behind a gateway of two workers."""

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

from app.embedded.server import EmbeddedTriton
from bench.harness.triton import Triton, embedded_triton
from tests.faults import models
from tests.faults.conftest import RecordFigure
from tests.faults.exchange import Answer, Case, ask, ask_all, encode
from tests.faults.relay import relay
from tests.faults.serving import WORKERS, Gateway, serving
from tests.faults.test_resources import NEEDS_MOUNTS, on_a_full_disk
from tests.faults.traffic import traffic
from tests.support import eventually

_PATIENCE_SECONDS = 30.0
_SECONDS = 5.0
"""The gateway's deadline."""
_IMAGE = encode(models.solid(10, 20, 30), Content_Type="image/png")
_READYZ, _LIVEZ = encode(b"", "/readyz", "GET"), encode(b"", "/livez", "GET")


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


async def until_all_workers_run(gateway: Gateway) -> None:
    """Wait until each worker has finished its start, in which it runs the default model once."""
    wanted = f"api_workers {WORKERS:.1f}\n".encode()
    end = monotonic() + _PATIENCE_SECONDS
    while wanted not in (await ask(gateway.url, encode(b"", "/metrics", "GET"))).body:
        assert monotonic() < end
        await asyncio.sleep(0.05)


async def until_opened(gateway: Gateway, model: str, times: int) -> None:
    """Wait until the log says that many more times that the circuit of a model was opened."""
    wanted = count_opened(gateway, model) + times
    end = monotonic() + _PATIENCE_SECONDS
    while count_opened(gateway, model) < wanted:
        assert monotonic() < end
        await asyncio.sleep(0.05)


@asynccontextmanager
async def asking_all_workers(url: str) -> AsyncIterator[None]:
    """Ask over new connections until the block ends: one worker may have accepted all those of other clients."""

    async def ask_again() -> None:
        while True:
            await asyncio.gather(*(ask(url, _IMAGE) for _ in range(8)))
            await asyncio.sleep(0.1)

    task = asyncio.create_task(ask_again())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def count_opened(gateway: Gateway, model: str) -> int:
    return sum(line["event"] == "circuit opened" and line["model"] == model for line in gateway.log_lines())


def code_of(answer: Answer) -> str:
    """Return the code of a problem; empty for an answer that is none."""
    is_problem = answer.headers.get("content-type") == "application/problem+json"
    return str(json.loads(answer.body)["code"]) if is_problem else ""


def percentile_99(answers: Sequence[Answer]) -> float:
    """Return the 99th percentile of the answers' times, seconds."""
    return sorted(answer.seconds for answer in answers)[int(len(answers) * 0.99)]


@asynccontextmanager
async def stopped(process: psutil.Process) -> AsyncIterator[None]:
    """Stop a process (SIGSTOP) during a block."""
    process.send_signal(signal.SIGSTOP)
    try:
        yield
    finally:
        process.send_signal(signal.SIGCONT)


async def test_a_triton_that_hangs_for_20_seconds(triton: Triton, gateway: Gateway, record_figure: RecordFigure) -> None:
    """Row 2: 504 at the deadline, then 503 at once, and 200 again soon after it goes on; liveness never changes."""
    await until_all_workers_run(gateway)
    assert (await ask(gateway.url, _IMAGE)).status == 200
    async with stopped(triton.process):
        started = monotonic()
        async with traffic(gateway.url, clients=16) as counted, asking_all_workers(gateway.url):
            await until_opened(gateway, "checksum", WORKERS)
            opened = monotonic() - started
        answers = [answer for _, answer in await ask_all(gateway.url, [Case("", _IMAGE)] * 500, clients=1)]
        readiness, liveness = await ask(gateway.url, _READYZ), await ask(gateway.url, _LIVEZ)
        await asyncio.sleep(max(0.0, started + 20 - monotonic()))
    continued = monotonic()
    seconds = await until_ready(gateway.url) - continued
    record_figure("SIGSTOP of Triton: slowest answer, s", counted.slowest, _SECONDS + 0.25)
    record_figure("SIGSTOP of Triton: circuits of both workers open after, s", opened)
    record_figure("SIGSTOP of Triton: 503 while they are open, p99, ms", percentile_99(answers) * 1e3, 10)
    record_figure("SIGSTOP of Triton: first 200 after SIGCONT, s", seconds, 3)

    assert set(counted.statuses) <= {200, 503, 504}
    assert counted.wrong == []
    assert counted.slowest <= _SECONDS + 0.25
    assert Counter(code_of(answer) for answer in answers) == {"circuit_open": 500}
    assert percentile_99(answers) < 0.010
    assert (readiness.status, liveness.status) == (503, 200)
    assert seconds < 3
    assert triton.process.is_running()


async def test_a_full_queue_never_opens_the_circuit(gateway: Gateway, record_figure: RecordFigure) -> None:
    """Row 6: what does not fit into the model's queue is rejected at once, a thousand times."""
    asked = encode(models.solid(1, 1, 1), "/predict/queue_of_4", Content_Type="image/png")
    counts: Counter[int] = Counter()
    full = 0
    end = monotonic() + 4 * _PATIENCE_SECONDS
    while full < 1000:
        assert monotonic() < end, counts
        answers = [answer for _, answer in await ask_all(gateway.url, [Case("", asked)] * 128, clients=32)]
        counts.update(answer.status for answer in answers)
        full += sum(answer.status == 503 for answer in answers)
        assert {code_of(answer) for answer in answers if answer.status == 503} <= {"triton_unavailable"}
        assert all("retry-after" in answer.headers for answer in answers if answer.status == 503)
    record_figure("full queue: answers 503", counts[503])
    record_figure("full queue: answers 200", counts[200])

    assert set(counts) <= {200, 429, 503}
    assert count_opened(gateway, "queue_of_4") == 0
    assert (await ask(gateway.url, asked)).status == 200


@pytest.mark.system
async def test_a_model_that_triton_has_no_longer(tmp_path: Path) -> None:
    """Row 8: after a restart without it, it is 503; one that Triton never had is 404; with it again, it is used again."""
    repository, home = tmp_path / "models", tmp_path / "home"
    models.write(repository)
    home.mkdir()
    asked = encode(models.solid(1, 1, 1), "/predict/nonsense", Content_Type="image/png")
    with embedded_triton(repository, "checksum") as triton:
        server = EmbeddedTriton(triton.settings)
        triton.process.kill()
        await eventually(lambda: not triton.process.is_running())
        await asyncio.to_thread(server.start)
        try:
            with gateway_to(triton, tmp_path, workers=1, timeout_seconds=20) as gateway:
                for _ in range(10):
                    assert (await ask(gateway.url, asked)).status == 200
                (repository / "nonsense").rename(tmp_path / "nonsense")
                await asyncio.to_thread(server.stop)
                await asyncio.to_thread(server.start)
                await until_ready(gateway.url)
                answers = [await ask(gateway.url, asked) for _ in range(10)]
                unknown = await ask(gateway.url, encode(models.solid(1, 1, 1), "/predict/nobody", Content_Type="image/png"))
                (tmp_path / "nonsense").rename(repository / "nonsense")
                await asyncio.to_thread(server.stop)
                await asyncio.to_thread(server.start)
                await until_ready(gateway.url)
                again = await ask(gateway.url, asked)
        finally:
            await asyncio.to_thread(server.stop)

    assert {code_of(answer) for answer in answers} == {"model_not_ready"}
    assert {answer.status for answer in answers} == {503}
    assert unknown.status == 404
    assert again.status == 200


@pytest.mark.system
@pytest.mark.parametrize("value", models.NONSENSE, ids=[text.replace(" ", "-") for text in models.NONSENSE.values()])
async def test_nonsense_is_never_an_answer(gateway: Gateway, value: int) -> None:
    """Row 9: 502, whatever is wrong, without the model's own words; the circuit stays closed."""
    asked = encode(models.solid(value, 0, 0), "/predict/nonsense?timeout_ms=20000", Content_Type="image/png")
    answers = [await ask(gateway.url, asked) for _ in range(12)]

    assert {answer.status for answer in answers} == {502}
    assert {code_of(answer) for answer in answers} <= {"invalid_model_output", "inference_failed"}
    assert not any(b"secret" in answer.body for answer in answers)


@pytest.mark.system
@NEEDS_MOUNTS
async def test_a_full_dev_shm(triton: Triton, tmp_path: Path, record_figure: RecordFigure) -> None:
    """Row 12: the tensors travel inline, and nothing dies of a page that is not there."""
    with gateway_to(triton, tmp_path, on_a_full_disk(Path("/dev/shm"), log=tmp_path / "dd.log"), timeout_seconds=20) as gateway:  # noqa: S108
        pids = gateway.pids()
        async with traffic(gateway.url) as counted:
            await counted.until(1000)
        health = json.loads((await ask(gateway.url, encode(b"", "/health", "GET"))).body)
        assert gateway.pids() == pids
    record_figure("full /dev/shm: requests", counted.requests)

    assert set(counted.statuses) == {200}
    assert counted.wrong == []
    assert health["performance"]["optimizations"]["transport"] == "inline"


@asynccontextmanager
async def breaking(url: str, every: float) -> AsyncIterator[str]:
    """Forward connections to a server, and break all of them from time to time; yields the address to connect to."""
    host, _, port = url.partition(":")
    writers: set[asyncio.StreamWriter] = set()

    async def connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection(host, int(port))
        both = {writer, there[1]}
        writers.update(both)
        await relay((reader, writer), there)
        writers.difference_update(both)

    async def reset() -> None:
        while True:
            await asyncio.sleep(every)
            for writer in list(writers):
                writer.transport.abort()

    server = await asyncio.start_server(connect, "127.0.0.1", 0)
    resetting = asyncio.create_task(reset())
    try:
        yield f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        resetting.cancel()
        server.close()
        for writer in list(writers):
            writer.transport.abort()
        await asyncio.gather(resetting, return_exceptions=True)


async def test_connections_that_break(triton: Triton, tmp_path: Path, record_figure: RecordFigure) -> None:
    """Row 5: a request is tried at most once more, and only some of them; the pixels of none become those of another."""
    before = await inferences(triton)
    async with breaking(triton.settings.triton_address, every=0.4) as address:
        key = triton.settings.control_key_path
        context = gateway_to(triton, tmp_path, triton_endpoints=address, triton_control_key_file=key)
        gateway = await asyncio.to_thread(context.__enter__)  # the way to Triton leads through this event loop
        try:
            async with traffic(gateway.url, clients=8) as counted:
                await counted.until(6000)
        finally:
            await asyncio.to_thread(context.__exit__, None, None, None)
    calls = await inferences(triton) - before
    record_figure("broken connections: requests", counted.requests)
    for status, count in sorted(counted.statuses.items()):
        record_figure(f"broken connections: answers {status}", count)
    record_figure("broken connections: inferences per request", calls / counted.requests, 1.1)

    assert set(counted.statuses) <= {200, 503}
    assert counted.wrong == []
    assert counted.slowest <= _SECONDS + 0.25
    assert calls <= 1.1 * counted.requests + 20  # probes, and the floor of each worker's budget


async def inferences(triton: Triton) -> int:
    async with grpc.aio.insecure_channel(triton.settings.triton_address) as channel:
        answer = await GRPCInferenceServiceStub(channel).ModelStatistics(service_pb2.ModelStatisticsRequest(name="checksum"))
    return int(answer.model_stats[0].inference_stats.success.count + answer.model_stats[0].inference_stats.fail.count)
