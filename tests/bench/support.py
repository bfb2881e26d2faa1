"""What tests of the bench need: a server on a real socket that answers as told, and made-up measurements."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import msgspec
import pytest

from app.triton.shared_memory import SHM
from bench.harness.environments import REFERENCE
from bench.load.images import Sample
from bench.load.outcome import Outcome, encode_latencies
from bench.report.measurements import Measurement, Overload, Run, TritonUse, WorkerMemory
from bench.report.records import Record, make_record

CAT = b'{"detections":[{"class_name":"cat"},{"class_name":"person"}],"model":{"name":"yolo11n"}}'
DOG = b'{"detections":[{"class_name":"dog"}]}'
SAMPLE = Sample("chelsea", b"\xff\xd8image", frozenset({"cat"}))

needs_reference = pytest.mark.skipif(not REFERENCE.is_installed(), reason=REFERENCE.missing)

_YAMA = Path("/proc/sys/kernel/yama/ptrace_scope")
needs_ptrace = pytest.mark.skipif(
    os.geteuid() != 0 and _YAMA.exists() and _YAMA.read_text(encoding="ascii") != "0\n",
    reason="py-spy needs root, or kernel.yama.ptrace_scope = 0",
)

Reply = Callable[[int, bytes], Awaitable[bytes | None]]
"""Called with the number of a request and its head and body; None closes the connection without an answer."""


def answer(body: bytes, status: str = "200 OK", *more: str) -> bytes:
    head = "\r\n".join([f"HTTP/1.1 {status}", f"content-length: {len(body)}", *more])
    return head.encode() + b"\r\n\r\n" + body


def always(response: bytes | None) -> Reply:
    async def reply(_number: int, _request: bytes) -> bytes | None:
        return response

    return reply


def silent(end: asyncio.Event) -> Reply:
    """Answer nothing; close the connections at the end."""

    async def reply(_number: int, _request: bytes) -> None:
        await end.wait()

    return reply


class FakeServer:
    """An HTTP server that counts its requests and connections."""

    def __init__(self, reply: Reply) -> None:
        self.reply = reply
        self.requests = 0
        self.connections = 0
        self.url = ""
        self.stop: Callable[[], None] = lambda: None
        """Stops listening."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0] or b"0")
                request = head + await reader.readexactly(length)
                self.requests += 1
                response = await self.reply(self.requests - 1, request)
                if response is None:
                    break
                writer.write(response)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@asynccontextmanager
async def serving(reply: Reply) -> AsyncIterator[FakeServer]:
    fake = FakeServer(reply)
    server = await asyncio.start_server(fake.serve, "127.0.0.1", 0)
    fake.stop = server.close
    fake.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        server.close()
        await server.wait_closed()


def arenas_of(pids: Iterable[int]) -> list[Path]:
    """Return the shared-memory arenas that processes have created."""
    return [path for pid in pids for path in SHM.glob(f"nereid-{pid}-*")]


@cache
def _encode(milliseconds: Sequence[float]) -> tuple[str, float]:
    """Encode latencies; return their mean, too, which takes long to compute from what is encoded."""
    made = Outcome(0.0, 0, {}, encode_latencies(value / 1e3 for value in milliseconds), {}, 0.0)
    return made.latency, made.mean


def make_outcome(milliseconds: Sequence[float], model: str = "", **statuses: int) -> Outcome:
    """Make up an outcome of two seconds with these latencies; statuses are given as s200=1, error=2."""
    counted = {name.removeprefix("s"): count for name, count in statuses.items()} or {"200": len(milliseconds)}
    latency, mean = _encode(tuple(milliseconds))
    made = Outcome(
        seconds=2.0,
        requests=sum(counted.values()),
        statuses=counted,
        latency=latency,
        stages={"decode": 2.0, "infer": 5.0, "total": 9.0},
        driver_cpu=0.25,
        model=model,
    )
    vars(made)["mean"] = mean
    return made


USE = TritonUse(inferences=100, executions=40, queue_ms=1.5, compute_ms=30.0, batches={"1": 10, "3": 30})
CPU = {"gateway": 3.0, "triton": 0.5, "stubs": 40.0, "client": 0.25}


def make_run(scale: float = 1.0, **changes: object) -> Run:
    """Make up a run with latencies of `scale` times 10 to 109 ms."""
    made = Run(
        contestant="nereid",
        mode="full",
        model="yolo11n",
        clients=4,
        outcome=make_outcome([scale * value for value in range(10, 110)]),
        triton=USE,
        cpu_ms=CPU,
    )
    return msgspec.structs.replace(made, figures={}, **changes)


def make_measurement(rate: float, cpu: float = 3.0) -> Measurement:
    """Make up a measurement with this throughput and CPU time of the gateway."""
    outcome = make_outcome([5.0, 9.0], s200=round(2 * rate))
    return Measurement(outcome=outcome, triton=USE, cpu_ms={**CPU, "gateway": cpu})


def make_runs_record(*runs: Run) -> Record:
    return make_record({"name": "full"}, runs)


def make_overload_runs(*contestants: str) -> list[Run]:
    """Make up, for each contestant, its peak and a burst of ten times as much, of which it rejects most."""
    memory = [WorkerMemory(seconds=[0.0, 0.2], resident_mib=[100.0, 120.0], proportional_mib=[90.0, 80.0])] * 2
    made = []
    for name in contestants:
        peak = Overload(phase="peak", offered=20, peak=20)
        burst = Overload(phase="open_10", offered=200, peak=20, before_ms=50.0, after_ms=60.0, memory=memory)
        full = make_outcome([300.0] * 40, s200=40, s429=350, error=2)
        full.rejections, full.goodput = encode_latencies([0.002] * 350), 19.0
        made.append(make_run(contestant=name, mode="overload", model="wait_20", overload=peak))
        made.append(
            make_run(contestant=name, mode="overload", model="wait_20", clients=None, rate=200.0, outcome=full, overload=burst)
        )
    return made
