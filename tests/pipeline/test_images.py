"""Images of a worker on their way to two Tritons and back, with all that can happen to them there."""

import asyncio
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule
from numpy.typing import NDArray

from app.errors import DeadlinePassed, InferenceFailed, TritonUnavailable
from app.pipeline.batch import PendingImage
from app.pipeline.batcher import Batchers
from app.pipeline.call import CallContext
from app.pipeline.triton_calls import TritonCalls
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, Caller
from app.resilience.model_queue import ModelQueue
from app.telemetry.timing import Timing
from app.triton.backend import TritonBackend
from app.triton.messages import InferResult
from app.triton.pool import TritonPool
from app.triton.server_info import ServerInfo
from app.triton.shared_memory import Slot
from app.triton.status import Disconnected, Draining, ModelDied, Overloaded, Unanswered, Unreachable, WrongAnswer
from app.triton.transport import Mode, Transport
from tests.fakes.triton import CONFIG
from tests.machines import Machine, check
from tests.support import METRICS

MAX_BATCH = 3
MAX_CALLS = 2
TRITONS = ("near:8001", "far:8001")
FAILURES = (Disconnected, Unreachable, Draining, ModelDied, Overloaded, Unanswered)
SECONDS = 60.0


class Sent(NamedTuple):
    """A call that Triton has not answered; `answer` gets the error, if any."""

    numbers: list[int]
    answer: "asyncio.Future[Exception | None]"


class Triton:
    """Answers when a rule says so, with what it finds then where the images should be; it stands for the client, too."""

    def __init__(self, address: str, version: str) -> None:
        self.address = address
        self.server = ServerInfo(version)
        self.survives_cancel = self.server.survives_cancel
        self.connection, self.connected_at = 0, math.inf
        self.left: set[Any] = set()
        self.calls: list[Sent] = []
        self.faults: list[object] = []
        self.longest = 0.0

    async def infer(
        self, _: object, tensors: Sequence[NDArray[Any]], *, request_id: str, slot: Slot | None = None, **__: object
    ) -> InferResult:
        if request_id in {"probe", "golden", "unit"}:
            return InferResult({"output0": np.ones((1, 2, 6), np.float32)}, "1")
        loop = asyncio.get_running_loop()
        call, began = Sent([int(number) for number in request_id.split(",")], loop.create_future()), loop.time()
        self.calls.append(call)
        try:
            if error := await call.answer:
                raise error
        except asyncio.CancelledError:
            self.faults += [call] if slot or not self.survives_cancel else []
            raise
        finally:
            self.calls.remove(call)
            self.longest = max(self.longest, loop.time() - began)
        images = tensors if slot is None else slot.array((len(tensors), *tensors[0].shape), np.uint8)
        self.faults += [call for number, image in zip(call.numbers, images, strict=True) if (image != number).any()]
        if any(is_poison(number) for number in call.numbers):
            raise InferenceFailed("no")
        return InferResult({"output0": np.array([image.flat[0] for image in images])[:, None]}, "1")

    async def read_server(self) -> ServerInfo:
        return self.server

    async def read_config(self, _: str) -> tuple[dict[str, Any], str]:
        return {**CONFIG, "max_batch_size": MAX_BATCH}, "1"

    async def ask(self, *_: object, **__: object) -> object:
        raise Unanswered("it counts nothing")

    async def register(self, _: object) -> None: ...

    async def unregister(self, _: str) -> None: ...

    async def list_regions(self) -> dict[str, str]:
        return {}

    async def close(self) -> None: ...


def is_poison(number: int) -> bool:
    return number % 5 == 0


class Images(Machine):
    """Every image gets its own answer once, or an error that it may get, and everything that it took is given back."""

    OF_TRITON = ("backend", "model_on_server", "regions", "shared_memory", "silence", "specs", "transport")
    OF_RESILIENCE = ("circuit_breaker", "concurrency", "deadline", "model_queue", "retry_budget")
    TIMED = (
        *(f"app.pipeline.{name}" for name in ("batch", "examiner", "triton_calls")),
        *(f"app.triton.{name}" for name in OF_TRITON),
        *(f"app.resilience.{name}" for name in OF_RESILIENCE),
    )

    @initialize(
        mode=st.sampled_from(["auto", "inline"]), version=st.sampled_from(["2.51.0", "2.59.1"]), tritons=st.sampled_from([1, 2, 2])
    )
    def begin(self, mode: Mode, version: str, tritons: int) -> None:
        (table,) = self.open_tables(1)
        self.tritons = [Triton(address, version) for address in TRITONS[:tritons]]
        clients: list[Any] = self.tritons
        self.transport = Transport(mode)
        self.pool = TritonPool(self.transport, [TritonBackend(client, table) for client in clients])
        self.calls = TritonCalls(self.pool, METRICS, lambda _: MAX_CALLS, SECONDS)
        self.batchers = Batchers(self.calls)
        self.batcher = self.batchers["tiny"]
        self.queue = ModelQueue(table, "tiny", 1000, 1e6)
        for server in self.pool.servers:
            self.spec = self.run(server.specs.get("tiny"))
        self.number = 0
        self.asking: dict[int, asyncio.Task[InferResult]] = {}
        """By the number that fills the image."""
        self.until: dict[int, float] = {}
        self.failed: set[int] = set()
        """Numbers of images that were in a call that failed."""
        self.has_died = False
        """Whether a process of the model has died, so that answers are dropped until the model is right again."""

    async def request(self, number: int, seconds: float) -> InferResult:
        self.queue.limit = 1000.0
        await self.transport.prepare(self.spec.image_bytes)
        call = CallContext(Deadline.after(seconds), Timing(), str(number), Caller("ab"[number % 2]))
        with await self.queue.admit(ANYBODY, Deadline.after(1e9)) as permit:
            buffer = self.transport.allocate(self.spec.image_shape, np.uint8, self.spec.image_bytes, permit)
            buffer.tensor[:] = number
            return await self.batcher.run(PendingImage(self.spec, buffer, call, permit))

    @property
    def is_all_sent(self) -> bool:
        found: list[object] = []
        self.call(lambda: found.append(self.calls.find(self.spec)))
        return not self.batcher.waiting or found == [None]

    @rule(images=st.sampled_from([1, 1, 2, 6]), seconds=st.sampled_from([1.0, 20.0, SECONDS]))
    def ask(self, images: int, seconds: float) -> None:
        for _ in range(images):
            self.number = self.number % 250 + 1
            self.until[self.number] = self.clock.now + seconds
            self.asking[self.number] = self.start(self.request(self.number, seconds))

    @precondition(lambda self: any(triton.calls for triton in self.tritons))
    @rule(data=st.data(), failure=st.sampled_from([None, None, *FAILURES]))
    def answer(self, data: st.DataObject, failure: type[Exception] | None) -> None:
        call = data.draw(st.sampled_from([call for triton in self.tritons for call in triton.calls]))
        if failure is not None:
            self.failed.update(call.numbers)
            self.has_died |= failure is ModelDied
        was_all_sent = self.is_all_sent
        self.clock.now += 2**-7  # no inference takes no time at all
        self.call(lambda: call.answer.set_result(None if failure is None else failure("no")))
        # Other answers may make a Triton unusable, or let its spec be read again.
        assert self.is_all_sent or not was_all_sent or failure is not None or any(map(is_poison, call.numbers))

    @precondition(lambda self: self.asking)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        asking = self.asking.pop(data.draw(st.sampled_from(sorted(self.asking))))
        was_all_sent = self.is_all_sent
        self.call(asking.cancel)
        assert self.is_all_sent or not was_all_sent
        assert asking.cancelled()

    @rule(seconds=st.sampled_from([0.0625, 1, 20, 61]))
    def let_pass(self, seconds: float) -> None:
        """The batchers are asked regularly; requests do not wait longer than they want to."""
        self.skip(seconds)
        for _ in range(3):  # what a time-out leads to takes some turns
            self.call(self.batchers.send)
        assert self.is_all_sent
        assert not [number for number in self.asking if self.until[number] <= self.clock.now and not self.asking[number].done()]

    @invariant()
    def everybody_gets_what_is_theirs(self) -> None:
        for number in [number for number, asking in self.asking.items() if asking.done()]:
            asking = self.asking.pop(number)
            error = asking.exception()
            if error is None:
                assert asking.result().outputs["output0"].tolist() == [[number]]
                assert not is_poison(number)
            else:
                # Whoever has less time than a call has taken may not be asked for.
                longest = max(triton.longest for triton in self.tritons)
                is_late = isinstance(error, DeadlinePassed) and self.until[number] - self.clock.now <= longest
                is_failed = isinstance(error, TritonUnavailable | DeadlinePassed) and number in self.failed
                is_dropped = isinstance(error, WrongAnswer) and self.has_died
                assert is_late or is_failed or is_dropped or (isinstance(error, InferenceFailed) and is_poison(number))
            self.failed.discard(number)
        assert not [fault for triton in self.tritons for fault in triton.faults]
        calls = [call for triton in self.tritons for call in triton.calls]
        assert max((len(call.numbers) for call in calls), default=0) <= MAX_BATCH
        for triton in self.tritons:  # calls that failed elsewhere may come on top; one is extra, for a caller that has no other
            awaited = [call for call in triton.calls if not self.asking.keys().isdisjoint(call.numbers)]
            moved = MAX_CALLS * self.has_died  # whose answers were dropped
            assert sum(self.failed.isdisjoint(call.numbers) for call in awaited) <= MAX_CALLS + 1 + moved
        numbers = [number for call in calls for number in call.numbers if number in self.asking]
        assert len(numbers) == len(set(numbers))
        assert self.queue.in_progress >= len(self.asking)

    def finish(self) -> None:
        """What is answered ends, and leaves nothing."""
        while self.asking or self.batcher.tasks or any(triton.calls for triton in self.tritons):
            self.clock.now += 2**-7
            for triton in self.tritons:
                for call in list(triton.calls):
                    self.call(lambda call=call: call.answer.set_result(None))  # type: ignore[misc]
            self.let_pass(0.25)
            self.everybody_gets_what_is_theirs()
        assert (len(self.batcher.waiting), self.batcher.calls, self.batcher.tasks) == (0, 0, set())
        assert self.queue.in_progress == self.queue.own == self.transport.count_slots()[1] == 0
        for server in self.pool.servers:
            assert server.model("tiny").calls == server.model("tiny").images == 0
        for closing in (self.batchers.close(10), self.transport.close(), self.pool.close()):
            task = self.start(closing)
            self.skip(1)
            self.run(task)


@pytest.mark.parametrize("runs", [10, pytest.param(75, marks=pytest.mark.system)])
def test_images_of_a_worker(runs: int) -> None:
    check(Images, runs=runs, steps=40)
