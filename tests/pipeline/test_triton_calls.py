"""Calls to two Tritons, of which one fails, hangs, forgets or is on another host."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import grpc
import msgspec
import numpy as np
import pytest

from app.errors import DeadlinePassed, GatewayError, InferenceFailed, TritonUnavailable
from app.model.spec import ModelSpec, from_triton_config
from app.pipeline.buffer import InputBuffer
from app.pipeline.call import CallContext
from app.pipeline.inference import InferenceRunner
from app.pipeline.triton_calls import TritonCalls
from app.resilience import circuit_breaker
from app.resilience.deadline import Deadline
from app.resilience.model_queue import ModelQueue
from app.resilience.worker_table import WorkerTable
from app.telemetry.timing import Timing
from app.triton.client import TritonClient
from app.triton.messages import InferResult
from app.triton.pool import TritonPool
from app.triton.server import TritonServer
from app.triton.shared_memory import Arena
from app.triton.status import Overloaded, Unreachable
from app.triton.transport import Mode, Transport
from tests.fakes.triton import CONFIG, FakeTriton, infer_response, serving
from tests.support import METRICS, captured_log, eventually

CONFIG_OF_BATCHES = {**CONFIG, "max_batch_size": 4}
SPEC = from_triton_config(CONFIG_OF_BATCHES, "1")
HANG_SECONDS = 1.0
STOPPING = grpc.StatusCode.UNAVAILABLE, "Server is stopping, scheduler is stopped"
REFUSED = grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses"
BROKEN = grpc.StatusCode.UNAVAILABLE, "Socket closed"
NOT_LOADED = grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions"
GONE = grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"
DIED = grpc.StatusCode.INTERNAL, "Stub process 'tiny_0_0' is not healthy."
FULL = grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"
POISON = grpc.StatusCode.INTERNAL, "the model has failed"


class AnsweringTriton(FakeTriton):
    """Answers as many images as it was asked for; its probes have the id `probe`."""

    def __init__(self) -> None:
        super().__init__()
        self.config = CONFIG_OF_BATCHES
        self.call_seconds = 0.0

    async def ModelInfer(self, request: object, context: object) -> object:  # noqa: N802
        """Answer each image."""
        await asyncio.sleep(self.call_seconds)
        images = request.inputs[0].shape[0]  # type: ignore[attr-defined]
        self.answer = infer_response(output0=np.zeros((images, 2, 6), np.float32))
        return await super().ModelInfer(request, context)

    @property
    def batches(self) -> list[int]:
        """How many images each call had, without those of probes."""
        return [request.inputs[0].shape[0] for request in self.requests if request.id != "probe"]

    @property
    def images(self) -> int:
        """How many images it was asked for, without those of probes."""
        return sum(self.batches)


class Setup:
    """Inferences on two fakes, which know the model."""

    def __init__(self, fakes: list[AnsweringTriton], mode: Mode) -> None:
        self.fakes = fakes
        self.transport = Transport(mode)
        self.pool = TritonPool(self.transport, [TritonServer(TritonClient(fake.url)) for fake in fakes])
        self.max_calls = 1.0
        calls = TritonCalls(self.pool, METRICS, lambda _: self.max_calls, HANG_SECONDS)
        self.inferences = InferenceRunner(calls)
        self.table = WorkerTable()
        self.queue = ModelQueue(self.table, "tiny", 1000, target_seconds=1e6)

    async def infer(self, seconds: float = 10, spec: ModelSpec = SPEC) -> InferResult:
        """Run one inference as a request does."""
        call = CallContext(Deadline.after(seconds), Timing(), "id")
        await self.transport.prepare(spec.image_bytes)
        with await self.queue.admit("", 1.0, Deadline.after(60)) as permit:
            buffer = InputBuffer(self.transport, permit)
            buffer.allocate(spec.image_shape, np.uint8, spec.image_bytes)[:] = 7
            return await self.inferences.run(spec, buffer, call, permit)

    async def errors(self, images: int, seconds: float = 10) -> list[GatewayError]:
        """Run inferences at the same time; return the errors of those that failed."""
        asked = await asyncio.gather(*(self.infer(seconds) for _ in range(images)), return_exceptions=True)
        assert not [error for error in asked if isinstance(error, BaseException) and not isinstance(error, GatewayError)]
        return [error for error in asked if isinstance(error, GatewayError)]

    def usable(self) -> list[bool]:
        """Return which of the Tritons count as working."""
        return [server.model("tiny").is_usable for server in self.pool.servers]

    async def let_second_take_two(self) -> None:
        """Give the second one a model with smaller batches."""
        self.fakes[1].config = {**CONFIG_OF_BATCHES, "max_batch_size": 2}
        self.pool.servers[1].specs.forget("tiny")
        await self.pool.servers[1].specs.get("tiny")

    async def until_busy(self, number: int) -> None:
        """Send images until a Triton has one."""
        while not self.fakes[number].images:
            await self.infer()


@pytest.fixture
async def stack() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as made:
        yield made


async def opened(stack: AsyncExitStack, mode: Mode = "inline", version: str = "2.51.0") -> Setup:
    """Make a set-up, which ends with the test."""
    fakes = [AnsweringTriton(), AnsweringTriton()]
    for fake in fakes:
        fake.version = version
        await stack.enter_async_context(serving(fake))
    setup = Setup(fakes, mode)
    stack.callback(setup.table.close)
    stack.push_async_callback(setup.pool.close)
    stack.push_async_callback(setup.transport.close)
    stack.push_async_callback(setup.inferences.close, 10)
    for fake in fakes:
        stack.callback(fake.may_answer.set)
    assert await eventually(lambda: all(server.client.server for server in setup.pool.servers))
    for server in setup.pool.servers:
        await server.specs.get("tiny")
    return setup


@pytest.fixture
async def setup(stack: AsyncExitStack) -> Setup:
    return await opened(stack)


async def test_both_get_calls_and_images_wait_only_while_both_are_busy(setup: Setup) -> None:
    """Each has one call at a time; what waits meanwhile leaves together."""
    for fake in setup.fakes:
        fake.may_answer.clear()
    asking = [asyncio.ensure_future(setup.infer()) for _ in range(6)]
    assert await eventually(lambda: [fake.running for fake in setup.fakes] == [1, 1])
    await asyncio.sleep(0.1)
    assert [fake.images for fake in setup.fakes] == [1, 1]
    for fake in setup.fakes:
        fake.may_answer.set()
    await asyncio.gather(*asking)

    assert sum(fake.images for fake in setup.fakes) == 6
    assert sum(len(fake.requests) for fake in setup.fakes) == 3
    assert [fake.most_running for fake in setup.fakes] == [1, 1]


@pytest.mark.parametrize("refusal", [STOPPING, REFUSED, BROKEN, DIED, FULL, NOT_LOADED, GONE])
async def test_what_one_does_not_take_goes_to_the_other(setup: Setup, refusal: tuple[grpc.StatusCode, str]) -> None:
    """No caller notices, however many there are at the same moment: there is a retry for each call."""
    setup.max_calls = 100
    setup.fakes[0].refusal = refusal
    setup.fakes[0].model_refusal = refusal

    assert await setup.errors(30) == []
    assert setup.fakes[1].images == 30


@pytest.mark.parametrize("refusal", [STOPPING, REFUSED, BROKEN, DIED])
async def test_one_that_loses_a_call_is_left_out_at_once(setup: Setup, refusal: tuple[grpc.StatusCode, str]) -> None:
    """It gets a probe now and then, and calls again once it has answered one."""
    setup.fakes[0].refusal = refusal
    await setup.until_busy(0)
    assert setup.usable() == [False, True]
    lost = setup.fakes[0].images
    assert await setup.errors(10) == []
    assert setup.fakes[0].images == lost
    setup.fakes[0].refusal = None

    assert await eventually(lambda: setup.usable() == [True, True])
    assert setup.pool.servers[0].model("tiny").speed == 0
    await asyncio.wait_for(asyncio.gather(*(setup.infer() for _ in range(20))), 10)
    assert setup.fakes[0].images > lost


async def test_one_that_has_too_much_to_do_works(setup: Setup) -> None:
    """It is asked again as soon as it may have room; if there is none at either, the caller is told."""
    setup.fakes[0].refusal = FULL
    assert await setup.errors(30) == []
    assert setup.usable() == [True, True]
    setup.fakes[1].refusal = FULL
    asked = setup.fakes[0].images + setup.fakes[1].images

    with pytest.raises(Overloaded):
        await setup.infer()
    assert setup.fakes[0].images + setup.fakes[1].images == asked + 2
    assert setup.usable() == [True, True]


async def test_the_last_one_that_works_is_not_left_out_at_once(setup: Setup) -> None:
    """Five failures in a row open its circuit, as if there were no other; only then are requests rejected."""
    setup.fakes[0].refusal = REFUSED
    await setup.until_busy(0)
    setup.fakes[1].refusal = REFUSED
    for _ in range(4):
        with pytest.raises(TritonUnavailable):
            await setup.infer()
    assert setup.pool.is_usable("tiny")
    with pytest.raises(TritonUnavailable):
        await setup.infer()

    assert not setup.pool.is_usable("tiny")


async def test_a_model_that_fails_is_not_tried_elsewhere(setup: Setup) -> None:
    """The image may be the reason; it would fail there, too. Both stay in use."""
    for fake in setup.fakes:
        fake.refusal = POISON
    with pytest.raises(InferenceFailed):
        await setup.infer()

    assert sum(fake.images for fake in setup.fakes) == 1
    assert setup.usable() == [True, True]


async def test_one_that_hangs_is_left_out_while_the_other_answers(setup: Setup) -> None:
    """The callers of its one call miss their deadline, and no others; it is used again when it answers."""
    assert await setup.errors(8) == []
    setup.fakes[0].may_answer.clear()
    hanging: list[asyncio.Future[InferResult]] = []
    while not setup.fakes[0].running:
        hanging.append(asyncio.ensure_future(setup.infer(2)))
        await asyncio.sleep(0.02)
    while setup.usable() != [False, True]:
        assert await setup.errors(1, seconds=2) == []
        await asyncio.sleep(0.02)
    assert await setup.errors(30, seconds=2) == []
    missed = [one for one in await asyncio.gather(*hanging, return_exceptions=True) if isinstance(one, BaseException)]
    assert [type(error) for error in missed] == [DeadlinePassed]
    assert setup.fakes[0].cancelled == 0
    setup.fakes[0].may_answer.set()

    assert await eventually(lambda: setup.usable() == [True, True])
    before = setup.fakes[0].images
    assert await setup.errors(30) == []
    assert setup.fakes[0].images > before


async def test_one_that_is_slow_is_used_beside_a_fast_one(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be left out once, until it is known how long its calls take."""
    log = captured_log(monkeypatch, circuit_breaker)
    setup.fakes[0].call_seconds, setup.fakes[1].call_seconds = 0.8, 0.02

    async def ask() -> None:
        while setup.fakes[0].images < 6:
            await setup.infer()

    await asyncio.gather(*(ask() for _ in range(4)))
    assert [call.args for call in log].count(("circuit opened",)) <= 1


async def test_one_alone_that_hangs_is_not_compared(stack: AsyncExitStack) -> None:
    """Without another, only what calls show counts."""
    setup = await opened(stack)
    setup.pool.remove(setup.pool.servers[1])
    await setup.infer()
    setup.fakes[0].may_answer.clear()
    with pytest.raises(DeadlinePassed):
        await setup.infer(0.9)

    assert setup.usable() == [True]


async def test_shared_memory_to_one_and_inline_to_the_other_at_the_same_time(stack: AsyncExitStack) -> None:
    """The tensor lies in the slot; the Triton on another host gets a copy of it."""
    setup = await opened(stack, "auto")
    setup.fakes[1].accepts_regions = False
    assert await setup.errors(30) == []

    near, far = setup.fakes
    assert near.images
    assert far.images
    assert all("shared_memory_region" in request.inputs[0].parameters for request in near.requests)
    assert all(not request.raw_input_contents for request in near.requests)
    assert {request.raw_input_contents[0] for request in far.requests} <= {
        b"\x07" * SPEC.image_bytes * images for images in range(1, 5)
    }


async def test_one_that_was_restarted_registers_again_and_the_other_does_not(stack: AsyncExitStack) -> None:
    """It has forgotten its regions."""
    setup = await opened(stack, "auto")
    assert await setup.errors(20) == []
    assert [len(fake.registrations) for fake in setup.fakes] == [1, 1]
    setup.fakes[0].regions.clear()
    assert await setup.errors(20) == []

    assert [len(fake.registrations) for fake in setup.fakes] == [2, 1]
    assert setup.usable() == [True, True]


@pytest.mark.parametrize(("error", "is_usable"), [(TritonUnavailable("no key yet"), True), (Unreachable("gone"), False)])
async def test_one_that_cannot_register_again_costs_nobody_an_answer(
    stack: AsyncExitStack,
    monkeypatch: pytest.MonkeyPatch,
    error: GatewayError,
    is_usable: bool,  # noqa: FBT001
) -> None:
    """It has no key for its controls yet, and gets the images inline; or it is gone again, and the other one gets them."""
    setup = await opened(stack, "auto")
    assert await setup.errors(20) == []

    async def fail(_: Arena) -> bool:
        raise error

    monkeypatch.setattr(setup.pool.servers[0].regions, "add_again", fail)
    setup.fakes[0].regions.clear()

    assert await setup.errors(20) == []
    assert setup.usable() == [is_usable, True]


async def test_slots_that_a_lost_triton_may_read_are_not_used_again(stack: AsyncExitStack) -> None:
    """The other one reads the same slots until it has answered; then the arena is removed."""
    setup = await opened(stack, "auto")
    await setup.until_busy(0)
    await setup.until_busy(1)
    (region,) = setup.fakes[1].regions
    setup.fakes[0].next_refusals = [BROKEN]
    while setup.fakes[0].next_refusals:
        await setup.infer()

    assert await eventually(lambda: region not in setup.fakes[1].regions)
    assert await setup.errors(10) == []
    assert await eventually(lambda: len(setup.fakes[1].regions) == 1)
    assert await setup.errors(20) == []
    assert "shared_memory_region" in setup.fakes[1].requests[-1].inputs[0].parameters


@pytest.mark.parametrize(("mode", "cancelled"), [("inline", 1), ("auto", 0)])
async def test_only_a_call_that_reads_no_slot_is_cancelled(stack: AsyncExitStack, mode: Mode, cancelled: int) -> None:
    """Though the image lies in one: what counts is what that Triton reads."""
    setup = await opened(stack, mode, version="2.59.1")
    for fake in setup.fakes:
        fake.may_answer.clear()
    with pytest.raises(DeadlinePassed):
        await setup.infer(0.2)
    await asyncio.sleep(0.2)

    assert sum(fake.cancelled for fake in setup.fakes) == cancelled


async def test_shared_memory_that_is_required_leaves_a_triton_without_it_out(stack: AsyncExitStack) -> None:
    """It gets no tensor inline."""
    setup = await opened(stack, "shm")
    setup.fakes[1].accepts_regions = False

    assert await setup.errors(30) == []
    assert (setup.fakes[0].images, setup.fakes[1].images) == (30, 0)


async def test_images_that_wait_leave_when_a_triton_comes_back(setup: Setup) -> None:
    """Though no call ends and no image comes."""
    for fake in setup.fakes:
        fake.may_answer.clear()
    asking = [asyncio.ensure_future(setup.infer()) for _ in range(3)]
    assert await eventually(lambda: [fake.running for fake in setup.fakes] == [1, 1])
    setup.pool.servers[0].model("tiny").calls = 0
    setup.inferences.send()
    assert await eventually(lambda: sum(fake.running for fake in setup.fakes) == 3)
    for fake in setup.fakes:
        fake.may_answer.set()

    setup.pool.servers[0].model("tiny").calls = 2
    await asyncio.gather(*asking)


async def test_batches_are_as_large_as_the_triton_takes(setup: Setup) -> None:
    """A model may have another batch size elsewhere."""
    await setup.let_second_take_two()
    assert msgspec.structs.replace(setup.pool.servers[1].specs.known(SPEC), max_batch=4) == SPEC
    assert await setup.errors(30) == []

    assert [max(fake.batches) for fake in setup.fakes] == [4, 2]


async def test_a_batch_does_not_go_where_it_is_too_large(setup: Setup) -> None:
    """The same Triton is asked again."""
    await setup.let_second_take_two()
    near, far = setup.fakes
    near.may_answer.clear()
    far.may_answer.clear()
    asking = asyncio.ensure_future(setup.errors(12))
    assert await eventually(lambda: [fake.running for fake in setup.fakes] == [1, 1])
    near.next_refusals = [None, BROKEN]
    near.may_answer.set()
    assert await eventually(lambda: len(near.requests) >= 3)
    far.may_answer.set()

    assert await asking == []
    assert near.batches[:3] == [1, 4, 4]
    assert max(far.batches) <= 2
