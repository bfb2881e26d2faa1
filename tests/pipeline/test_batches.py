"""Batches of images: those that callers send, whose memory is given back, and those that go to Triton together."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.errors import (
    DeadlinePassed,
    GatewayError,
    GatewayFull,
    InferenceFailed,
    InvalidParameter,
    MalformedRequest,
)
from app.model.spec import ModelSpec, from_triton_config
from app.pipeline import batcher as batcher_module
from app.pipeline import preprocess
from app.pipeline.batch import Batch, Call, PendingImage
from app.pipeline.batch_request import BatchRequest, Image
from app.pipeline.batcher import Batcher
from app.pipeline.call import CallContext, DetectOptions
from app.pipeline.results import Detections
from app.pipeline.tensors import run_tensor
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, Caller
from app.resilience.lease import Lease
from app.resilience.memory import MemoryBudget
from app.telemetry.timing import Timing
from app.triton.messages import InferResult
from app.triton.model_on_server import InFlightCall, ModelOnServer
from tests.fakes.clock import Clock
from tests.fakes.https import Host, response, serving
from tests.fakes.triton import CONFIG, config_with, infer_response
from tests.pipeline import refusals
from tests.pipeline.gate import Gate
from tests.support import SCENE, eventually, in_cycles
from tests.world import World

OPTIONS = DetectOptions(None, 0.5, None, 10)
IMAGE = "/scene.bmp"
TABLE = np.array([[0, 0, 8, 8, 0.75, 1], [2, 2, 6, 6, 0.5, 0]], np.float32)
STAGES = ["model", "queue", "decode", "batch", "infer", "post"]

pytestmark = pytest.mark.world(mode="inline", memory_bytes=40 * len(SCENE))


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with serving() as made:
        made.answers[IMAGE] = response(SCENE)
        yield made


@pytest.fixture
async def world(world: World, host: Host) -> AsyncIterator[World]:
    world.fake.answer = infer_response(output0=TABLE)
    world.pipeline.fetcher = host.fetcher()
    yield world
    await eventually(lambda: used(world) == (0, 0))


async def keep(_: int, found: Detections | Exception, timing: Timing) -> Any:  # noqa: ANN401
    """Report the type of the result or error, and the stages."""
    return type(found).__name__, list(timing.stages)


async def open_batch(
    world: World, images: list[Image], seconds: float = 30, options: DetectOptions = OPTIONS
) -> BatchRequest[Detections]:
    return await BatchRequest.open(world.pipeline, images, options, CallContext(Deadline.after(seconds), Timing(), "abc"))


async def outcomes(batch: BatchRequest[Detections]) -> list[Any]:
    """Return the reports of `keep` in order of completion."""
    async with batch.run(keep) as done:
        return [await image for image in done]


def used(world: World) -> tuple[int, int]:
    """Return the memory used by all images and by batches, bytes."""
    return world.admission.memory.used_bytes, world.admission.batch_memory.used_bytes


async def test_images_succeed_and_fail_alone_and_errors_keep_none(world: World) -> None:
    images: list[Image] = [SCENE, b"junk", MalformedRequest("no image"), SCENE, SCENE[:500]]
    with in_cycles(CallContext) as kept:
        found = await outcomes(await open_batch(world, images))

    assert sorted(name for name, _ in found) == [*["Detections"] * 2, "InvalidImage", "MalformedRequest", "UnsupportedFormat"]
    for name, stages in found:
        assert (stages == STAGES) is (name == "Detections")
    assert not images
    assert not kept


async def test_images_are_counted_before_triton_is_asked_for_the_model(world: World) -> None:
    world.fake.may_tell.clear()
    waiting = asyncio.create_task(open_batch(world, [SCENE] * 15, 20, OPTIONS._replace(model="other")))
    await eventually(lambda: world.fake.config_reads > 0)
    assert used(world) == (15 * len(SCENE), 15 * len(SCENE))
    reads = world.fake.config_reads
    with pytest.raises(GatewayFull, match="no memory left for the images of this batch") as raised:
        await open_batch(world, [SCENE] * 10, options=OPTIONS._replace(model="another"))

    assert (raised.value.reason, world.fake.config_reads) == ("memory", reads)
    await world.time.skip(20)
    with pytest.raises(DeadlinePassed):
        await waiting
    assert used(world) == (0, 0)
    world.let_answer()
    with pytest.raises(InvalidParameter):
        await open_batch(world, [SCENE], options=OPTIONS._replace(classes=["unicorn"]))


@pytest.mark.parametrize("how", ["answered", "abandoned", "late"])
async def test_images_that_wait_hold_their_bytes_and_no_pixels(
    monkeypatch: pytest.MonkeyPatch, world: World, gate: Gate, how: str
) -> None:
    """The bytes are held until the thread that reads them has ended."""
    entered = gate.block(monkeypatch, preprocess, "fill_input")
    found: list[Any] = []
    async with (await open_batch(world, [SCENE] * 10, 20)).run(keep) as done:
        await eventually(gate.reached.is_set)
        images, batches = used(world)
        assert batches == 10 * len(SCENE)
        assert images <= batches + 10 * world.admission.queues["tiny"].own * 3 * 32 * 32
        if how == "answered":
            gate.opened.set()
        elif how == "late":
            await world.round_trip()
            await world.time.skip(20)
        if how != "abandoned":
            found = [name for name, _ in [await image for image in done]]
    assert found == {"answered": ["Detections"] * 10, "abandoned": [], "late": ["DeadlinePassed"] * 10}[how]
    assert used(world)[1] == (0 if how == "answered" else 10 * len(SCENE))
    gate.opened.set()

    await eventually(lambda: used(world) == (0, 0))
    assert len(entered) == len(found) if how == "answered" else len(entered) == 1
    assert world.admission.queues["tiny"].in_progress == 0


@pytest.mark.parametrize("part", ["memory", "batch_memory"])
async def test_address_waits_for_memory(world: World, host: Host, part: str) -> None:
    budget: MemoryBudget = getattr(world.admission, part)
    others = budget.reserve(ANYBODY)
    others.add(budget.limit_bytes - 100)  # the address itself has room
    waiting = asyncio.ensure_future(outcomes(await open_batch(world, [host.url(IMAGE)])))
    await eventually(lambda: len(host.requests) == 1 and not host.open_connections)
    await world.round_trip()
    assert not waiting.done()
    others.release()

    assert await waiting == [("Detections", ["fetch", *STAGES])]
    assert len(host.requests) == 2


SIDE = 32
BATCHES = CONFIG | {"max_batch_size": 4}


async def ask_tensor(world: World, images: int | None = None, seconds: float = 20) -> InferResult:
    shape = (SIDE, SIDE, 3) if images is None else (images, SIDE, SIDE, 3)
    declared = "image", "UINT8", shape

    async def read(dtype: Any, count: int) -> Any:  # noqa: ANN401
        return np.zeros(count, dtype)

    call = CallContext(Deadline.after(seconds), Timing(), "abc")
    return (await run_tensor(world.pipeline, "tiny", None, declared, read, call))[1]


@pytest.mark.parametrize("is_late", [False, True])
async def test_tensor_takes_the_place_of_an_image_until_its_deadline(world: World, *, is_late: bool) -> None:
    world.hold()
    task = asyncio.create_task(ask_tensor(world, seconds=5))
    await eventually(lambda: world.running == [1])
    assert (world.used_bytes, world.queue.in_progress) == (SIDE * SIDE * 3, 1)
    if is_late:
        await world.time.skip(6)
        with pytest.raises(DeadlinePassed):
            await task
    world.let_answer()
    if not is_late:
        np.testing.assert_array_equal((await task).outputs["output0"], TABLE)

    await eventually(lambda: world.used_bytes == world.queue.in_progress == 0)


async def test_images_of_a_tensor_fail_together(world: World) -> None:
    """The others are cancelled, and leave nothing."""
    world.fake.config = BATCHES
    world.fake.answer = infer_response(output0=TABLE[None])
    assert (await ask_tensor(world, images=3)).outputs["output0"].shape == (3, 2, 6)
    world.fake.may_answer.clear()
    world.fake.held = {"abc,abc"}
    world.fake.next_refusals = [refusals.FAILED]
    with pytest.raises(InferenceFailed):
        await ask_tensor(world, images=4)
    assert not any("run_tensor" in repr(task) for task in asyncio.all_tasks())
    world.let_answer()

    await eventually(lambda: world.used_bytes == world.queue.in_progress == 0)


async def test_tensor_is_sent_again_if_triton_is_being_stopped_or_the_model_was_replaced(world: World) -> None:
    world.fake.next_refusals = [refusals.STOPPING]
    assert (await ask_tensor(world)).version == "1"
    world.fake.config, world.fake.model_versions = config_with(labels="new,other"), ["2"]
    assert (await ask_tensor(world)).version == "2"
    world.fake.config = {**CONFIG, "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [64, 64, 3]}]}
    world.fake.model_versions = ["3"]
    with pytest.raises(MalformedRequest, match=r"of shape \[64, 64, 3\]"):
        await ask_tensor(world)


BATCHED = from_triton_config({**CONFIG, "max_batch_size": 4}, "1")


class Calls:
    """Answers each image with the number in its tensor, once `may_answer` is set; tests set the attributes."""

    def __init__(self, max_calls: float) -> None:
        self.max_calls = max_calls
        server: Any = SimpleNamespace(specs=SimpleNamespace(known=lambda spec: spec), regions=set())
        self.served = ModelOnServer(server)
        self.batches: list[list[int]] = []
        """The numbers of the images of each call, in order."""
        self.are_urgent: list[bool] = []
        """Whether Triton should run each call before others."""
        self.may_answer = asyncio.Event()
        self.poison: dict[int, GatewayError] = {}
        """Errors by the number of the image that causes them; they fail the whole batch."""

    def find(self, _: ModelSpec, more_calls: int = 0) -> ModelOnServer | None:
        return self.served if self.served.calls < self.max_calls + more_calls else None

    async def infer(self, batch: Batch, call: InFlightCall) -> list[InferResult]:
        numbers = [int(image.buffer.tensor[0]) for image in batch.images]
        self.batches.append(numbers)
        self.are_urgent.append(batch.is_urgent)
        await self.may_answer.wait()
        self.served.note_answer(len(numbers), call.began_at)
        for number in numbers:
            if number in self.poison:
                raise self.poison[number]
        return InferResult({"output0": np.array(numbers, np.float32)[:, None]}, "1").split(batch.spec, len(numbers))

    def abandon(self, image: PendingImage, call: Call | None) -> None: ...


class Setup:
    def __init__(self) -> None:
        self.calls = Calls(1)
        calls: Any = self.calls
        self.batcher = Batcher(calls)
        self.asking: list[asyncio.Task[float]] = []
        self._numbers = count()

    async def start(self, images: int = 1, caller: str = "", *, seconds: float = 30) -> Sequence[asyncio.Task[float]]:
        """Start requests; their results are the numbers of their images, from 0."""
        call = CallContext(Deadline.after(seconds), Timing(), "", Caller(caller))
        started = [asyncio.ensure_future(self._infer(next(self._numbers), call)) for _ in range(images)]
        self.asking += started
        await turns()
        return started

    async def _infer(self, number: int, call: CallContext) -> float:
        call = call._replace(timing=Timing(), request_id=f"id{number}")
        buffer: Any = SimpleNamespace(slot=None, tensor=np.array([number], np.uint8))
        with Lease() as permit:
            as_permit: Any = permit
            result = await self.batcher.run(PendingImage(BATCHED, buffer, call, as_permit))
            return float(result.outputs["output0"][0, 0])

    async def finish(self) -> list[Any]:
        """Let all be answered; return the results."""
        self.calls.may_answer.set()
        return await asyncio.gather(*self.asking, return_exceptions=True)


async def turns() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


@pytest.fixture
async def setup() -> AsyncIterator[Setup]:
    made = Setup()
    yield made
    await made.finish()
    await turns()
    assert len(made.batcher.waiting) == made.batcher.calls == 0
    assert not made.batcher.tasks


async def test_poison_after_poison_ends_the_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches end when no retries are left, so that no image ever fails because of another."""
    monkeypatch.setattr(batcher_module, "_MAX_ISOLATED", 6)
    setup = Setup()
    setup.calls.poison = {number: InferenceFailed("no") for number in range(0, 40, 2)}
    await setup.start(40)
    results = await setup.finish()

    assert [result for result in results if not isinstance(result, InferenceFailed)] == list(range(1, 40, 2))
    assert len(setup.calls.batches) <= 40 + 6
    assert all(len(batch) == 1 for batch in setup.calls.batches[-20:])


async def test_caller_with_no_image_under_way_has_one_extra_call(setup: Setup) -> None:
    setup.calls.max_calls = 2
    for images, caller in ((6, "a"), (3, "b"), (1, "c"), (1, "a")):
        await setup.start(images, caller)

    assert setup.calls.batches == [[0], [1], [6]]
    assert setup.calls.are_urgent == [False, False, True]
    assert await setup.finish() == list(range(11))


async def test_image_that_can_only_be_late_is_not_sent(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Recent calls took longer than it has left, and another one is under way. A single measurement decides nothing."""
    clock = Clock(monkeypatch, "app.triton.model_on_server", "app.resilience.deadline")
    setup.calls.served.forget_speed()  # measured from now
    setup.calls.max_calls = 3
    await setup.start(1)
    await setup.start(1)
    clock.now += 5
    assert await setup.finish() == [0, 1]
    setup.calls.may_answer.clear()
    await setup.start(1)
    (late,) = await setup.start(1, seconds=4)
    assert isinstance(late.exception(), DeadlinePassed)
    await setup.start(1, seconds=6)
    assert (await setup.finish())[4:] == [4]

    assert await (await setup.start(1, seconds=0.1))[0] == 5  # alone
