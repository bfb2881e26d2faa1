"""What tests of the bench need: a server on a real socket that answers as told, and made-up measurements."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec

from app.triton.shared_memory import SHM
from bench.load.images import Sample
from bench.load.outcome import Outcome, encode_latencies
from bench.report.measurements import Measurement, Run, TritonUse

CAT = b'{"detections":[{"class_name":"cat"},{"class_name":"person"}],"model":{"name":"yolo11n"}}'
DOG = b'{"detections":[{"class_name":"dog"}]}'
SAMPLE = Sample("chelsea", b"\xff\xd8image", frozenset({"cat"}))

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


def make_outcome(milliseconds: Sequence[float], **statuses: int) -> Outcome:
    """Make up an outcome of two seconds with these latencies; statuses are given as s200=1, error=2."""
    counted = {name.removeprefix("s"): count for name, count in statuses.items()} or {"200": len(milliseconds)}
    return Outcome(
        seconds=2.0,
        requests=sum(counted.values()),
        statuses=counted,
        latency=encode_latencies(value / 1e3 for value in milliseconds),
        stages={"decode": 2.0, "infer": 5.0, "total": 9.0},
        driver_cpu=0.25,
    )


def make_run(scale: float = 1.0, rounds: int = 0, **changes: object) -> Run:
    """Make up a run with latencies of `scale` times 10 to 109 ms, and so many rounds like it."""
    outcome = make_outcome([scale * value for value in range(10, 110)])
    use = TritonUse(inferences=100, executions=40, queue_ms=1.5, compute_ms=30.0, batches={"1": 10, "3": 30})
    cpu = {"gateway": 3.0, "triton": 0.5, "stubs": 40.0, "client": 0.25}
    made = Run(contestant="nereid", mode="full", model="yolo11n", clients=4, outcome=outcome, triton=use, cpu_ms=cpu)
    held = [Measurement(outcome=outcome, triton=use, cpu_ms=cpu)] * rounds
    return msgspec.structs.replace(made, figures={}, rounds=held, **changes)
