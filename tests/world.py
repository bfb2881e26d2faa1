"""The world of an inference: Tritons that answer as a test wants, and one worker with all it needs to ask them."""

import asyncio
import sys
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from functools import cached_property, partial
from math import inf
from time import monotonic
from typing import Any

import numpy as np
import pytest

from app.errors import DeadlinePassed, GatewayError
from app.model.spec import ModelSpec, from_triton_config
from app.pipeline.batch import PendingImage
from app.pipeline.batcher import Batchers
from app.pipeline.call import CallContext, DetectOptions
from app.pipeline.pipeline import Models, Pipeline
from app.pipeline.results import Detections
from app.pipeline.triton_calls import TritonCalls, calls_per_worker
from app.resilience.admission import Admission
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, Caller
from app.resilience.model_queue import ModelQueue, Permit
from app.telemetry.timing import Timing
from app.telemetry.trace_context import TraceContext
from app.triton import model_on_server
from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from app.triton.messages import InferResult
from app.triton.pool import TritonPool
from app.triton.shared_memory import Slot
from app.triton.transport import Mode, Transport
from tests.fakes.triton import SPEC, FakeTriton, serving
from tests.processes import PATIENCE_SECONDS
from tests.support import LIMITS, METRICS, SCENE, TABLE, eventually, open_admission

HANG_SECONDS = 60.0
"""An inference without an answer for so long has failed."""
IMAGE = np.arange(SPEC.image_bytes, dtype=np.uint32).astype(np.uint8).reshape(SPEC.image_shape)
OPTIONS = DetectOptions(None, 0.25, None, 100)


class _LoopTime:
    """Of an event loop; never set back, because the loop has timers of others, too."""

    ahead = 0.0

    def __call__(self) -> float:
        return monotonic() + self.ahead


class Time:
    """The time of `app` and of its event loop, which a test may let pass at once."""

    def __init__(self) -> None:
        loop: Any = asyncio.get_running_loop()
        if not isinstance(loop.time, _LoopTime):
            loop.time = _LoopTime()
        self._loop = loop
        self._began_ahead = loop.time.ahead

    def __call__(self) -> float:
        return monotonic() + self._loop.time.ahead - self._began_ahead  # type: ignore[no-any-return]

    async def skip(self, seconds: float) -> None:
        """Let time pass. What is due until then happens meanwhile, the earliest first."""
        passed = asyncio.Event()
        self._loop.call_later(seconds, passed.set)
        self._loop.time.ahead += seconds
        await passed.wait()


@contextmanager
def time_of_app() -> Iterator[Time]:
    """Let time pass at once where a test says so."""
    time = Time()
    with pytest.MonkeyPatch.context() as patch:
        # Real time makes no Triton silent, however busy the machine is.
        patch.setattr(model_on_server, "_MIN_SILENCE_SECONDS", 15.0)
        for name, module in list(sys.modules.items()):
            if name.startswith("app.") and vars(module).get("monotonic") is monotonic:
                patch.setattr(module, "monotonic", time)
        yield time


class Gate:
    """Blocks a thread until the gate is opened: one that waits for it, or any at a step that it blocks."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.opened = threading.Event()

    def wait(self) -> str:
        self.reached.set()
        self.opened.wait(PATIENCE_SECONDS)
        return "done"

    def block(self, monkeypatch: pytest.MonkeyPatch, module: Any, name: str) -> list[str]:  # noqa: ANN401
        """Block a step; return a list that gets the names of the threads that reach it."""
        step = getattr(module, name)
        entered: list[str] = []

        def blocked(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
            entered.append(threading.current_thread().name)
            self.wait()
            return step(*arguments, **keywords)

        monkeypatch.setattr(module, name, blocked)
        return entered


class World:
    """Tritons with the model `tiny`, and a worker that uses them."""

    def __init__(self, fakes: Sequence[FakeTriton], admission: Admission, time: Time, mode: Mode, max_calls: float) -> None:
        self.fakes = fakes
        self.time = time
        self.admission = admission
        self.max_calls = max_calls
        self.transport = Transport(mode)
        self.pool = TritonPool(self.transport, [TritonBackend(TritonClient(fake.url), TABLE) for fake in fakes])
        self.batchers = Batchers(TritonCalls(self.pool, METRICS, lambda _: self.max_calls, HANG_SECONDS))
        calls = TritonCalls(self.pool, METRICS, partial(calls_per_worker, 0, TABLE), LIMITS.timeout_seconds)
        known = Models("tiny", pullable={"listed": "listed"}, last_change=lambda: 0)
        self.pipeline = Pipeline(calls, admission, known, LIMITS)
        self.slot: Slot | None = None
        """Of the last inference."""

    @property
    def fake(self) -> FakeTriton:
        return self.fakes[0]

    @cached_property
    def spec(self) -> ModelSpec:
        """Of its model; images go together only if theirs is the same object."""
        return from_triton_config(self.fake.config, "1")

    @property
    def server(self) -> TritonBackend:
        """The worker's view of the first Triton."""
        return self.pool.servers[0]

    @property
    def client(self) -> TritonClient:
        return self.server.client

    @property
    def running(self) -> list[int]:
        return [fake.running for fake in self.fakes]

    @property
    def usable(self) -> list[bool]:
        return [server.is_usable("tiny") for server in self.pool.servers]

    @property
    def queue(self) -> ModelQueue:
        """The model's queue, after the first request."""
        return self.admission.queues["tiny"]

    @property
    def used_bytes(self) -> int:
        return self.admission.memory.used_bytes

    @property
    def is_slot_free(self) -> bool:
        assert self.slot is not None
        return not self.slot.arena.lent_bytes

    def free_slots(self, nbytes: int = SPEC.image_bytes) -> int:
        slot = self.transport.take(nbytes, nbytes)
        assert slot
        slot.arena.give_back(slot)
        return (slot.arena.nbytes - slot.arena.lent_bytes) // nbytes

    def hold(self) -> None:
        for fake in self.fakes:
            fake.may_answer.clear()

    def let_answer(self) -> None:
        for fake in self.fakes:
            fake.may_answer.set()
            fake.may_tell.set()

    async def until_known(self) -> None:
        """Wait until the worker knows the version of each Triton, and its model."""
        await eventually(lambda: all(server.client.server for server in self.pool.servers))
        for server in self.pool.servers:
            await server.specs.get("tiny")

    async def set_version(self, version: str) -> None:
        """Set the version that each Triton reports and the worker knows."""
        await self.until_known()
        for fake, server in zip(self.fakes, self.pool.servers, strict=True):
            fake.version = version
            server.client.server = await server.client.read_server()

    async def admit(self, model: str = "tiny") -> Permit:
        return await self.admission.admit(model, 1, self.admission.memory.reserve(ANYBODY), Deadline.after(1e9))

    async def infer(  # noqa: PLR0913 - what tests choose
        self,
        seconds: float = 30,
        *,
        request_id: str = "id",
        caller: Caller = ANYBODY,
        trace: TraceContext | None = None,
        spec: ModelSpec | None = None,
        size: tuple[int, int] | None = None,
    ) -> InferResult:
        spec = spec or self.spec
        call = CallContext(Deadline.after(seconds), Timing(), request_id, caller, trace=trace)
        await self.transport.prepare(spec.image_bytes)
        with await self.admit(spec.reference) as permit:
            buffer = self.transport.allocate(spec.shape_of(size or spec.input_size), np.uint8, spec.image_bytes, permit)
            buffer.tensor[: len(IMAGE), : len(IMAGE)] = IMAGE
            self.slot = buffer.slot
            return await self.batchers[spec.reference].run(PendingImage(spec, buffer, call, permit))

    async def start(self, images: int = 1, seconds: float = 30, **others: Any) -> list[asyncio.Task[InferResult]]:  # noqa: ANN401
        """Start inferences, and wait until Triton has them."""
        before = sum(len(fake.requests) for fake in self.fakes)
        asking = [asyncio.create_task(self.infer(seconds, **others)) for _ in range(images)]
        await eventually(lambda: sum(len(fake.requests) for fake in self.fakes) >= before + images)
        return asking

    async def give_up(self, images: int = 1, seconds: float = 20, **others: Any) -> None:  # noqa: ANN401
        """Let the deadlines of inferences pass that Triton has and does not answer."""
        asking = await self.start(images, seconds, **others)
        await self.time.skip(seconds)
        missed = await asyncio.gather(*asking, return_exceptions=True)
        assert [type(failed) for failed in missed] == [DeadlinePassed] * images

    async def leave(self, asking: Sequence[asyncio.Task[Any]]) -> None:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)

    async def settle(self) -> None:
        """Let all inferences be answered, also those that nobody waits for any more."""
        self.let_answer()
        await self.batchers.close(10)
        await asyncio.sleep(0)
        await eventually(lambda: not any(self.running))

    async def round_trip(self) -> None:
        """Ask each Triton something; what was sent to it before has arrived by then."""
        for _ in range(3):
            await asyncio.gather(*(server.client.read_server() for server in self.pool.servers))

    async def errors(self, images: int, seconds: float = 30) -> list[GatewayError]:
        asked = await asyncio.gather(*(self.infer(seconds) for _ in range(images)), return_exceptions=True)
        failed = [error for error in asked if isinstance(error, BaseException)]
        assert all(isinstance(error, GatewayError) for error in failed)
        return failed  # type: ignore[return-value]

    async def detect(
        self,
        data: bytes = SCENE,
        seconds: float = 30,
        caller: Caller = ANYBODY,
        **options: Any,  # noqa: ANN401
    ) -> Detections:
        """Send an image through the pipeline, with options that differ from the usual ones."""
        call = CallContext(Deadline.after(seconds), Timing(), "abc", caller)
        return await self.pipeline.run(data, OPTIONS._replace(**options), call)

    async def close(self) -> None:
        self.let_answer()
        await self.pipeline.close()
        await self.batchers.close(10)
        await self.transport.close()
        await self.pool.close()


@asynccontextmanager
async def open_world(*fakes: FakeTriton, mode: Mode = "auto", max_calls: float = inf, **capacity: float) -> AsyncIterator[World]:
    """Serve fakes, one unless they are given, and open a worker on them; its admission has this capacity."""
    fakes = fakes or (FakeTriton(),)
    async with AsyncExitStack() as stack:
        for fake in fakes:
            if not fake.url:
                await stack.enter_async_context(serving(fake))
        admission = stack.enter_context(open_admission(**{"max_requests": 1000, **capacity}))
        made = World(fakes, admission, stack.enter_context(time_of_app()), mode, max_calls)
        stack.push_async_callback(made.close)
        yield made
