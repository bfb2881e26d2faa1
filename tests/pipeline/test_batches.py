"""Batches of images and tensors that callers send: they succeed and fail alone, and their memory is given back."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from app.errors import DeadlinePassed, GatewayFull, InferenceFailed, InvalidParameter, MalformedRequest
from app.pipeline import preprocess
from app.pipeline.batch_request import BatchRequest, Image
from app.pipeline.call import CallContext, DetectOptions
from app.pipeline.results import Detections
from app.pipeline.tensors import run_tensor
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY
from app.resilience.memory import MemoryBudget
from app.telemetry.timing import Timing
from app.triton.messages import InferResult
from tests.fakes.http import Host, response, serving_host
from tests.fakes.triton import CONFIG, SPEC, config_with, infer_response
from tests.pipeline.conftest import FAILED, STOPPING
from tests.support import SCENE, eventually, in_cycles
from tests.world import OPTIONS, Gate, World

IMAGE = "/scene.bmp"
TABLE = np.array([[0, 0, 8, 8, 0.75, 1], [2, 2, 6, 6, 0.5, 0]], np.float32)
STAGES = ["model", "queue", "decode", "batch", "infer", "post"]

pytestmark = pytest.mark.world(mode="inline", memory_bytes=40 * len(SCENE))


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with serving_host() as made:
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
    async with batch.run(keep) as done:
        return [await image for image in done]


def used(world: World) -> tuple[int, int]:
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


async def ask_tensor(world: World, images: int | None = None, seconds: float = 20) -> InferResult:
    declared = "image", "UINT8", SPEC.image_shape if images is None else (images, *SPEC.image_shape)

    async def read(dtype: Any, count: int) -> Any:  # noqa: ANN401
        return np.zeros(count, dtype)

    call = CallContext(Deadline.after(seconds), Timing(), "abc")
    return (await run_tensor(world.pipeline, "tiny", None, declared, read, call))[1]


@pytest.mark.parametrize("is_late", [False, True])
async def test_tensor_takes_the_place_of_an_image_until_its_deadline(world: World, *, is_late: bool) -> None:
    world.hold()
    task = asyncio.create_task(ask_tensor(world, seconds=5))
    await eventually(lambda: world.running == [1])
    assert (world.used_bytes, world.queue.in_progress) == (SPEC.image_bytes, 1)
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
    world.fake.config = CONFIG | {"max_batch_size": 4}
    world.fake.answer = infer_response(output0=TABLE[None])
    assert (await ask_tensor(world, images=3)).outputs["output0"].shape == (3, 2, 6)
    world.fake.may_answer.clear()
    world.fake.held = {"abc,abc"}
    world.fake.next_refusals = [FAILED]
    with pytest.raises(InferenceFailed):
        await ask_tensor(world, images=4)
    assert not any("run_tensor" in repr(task) for task in asyncio.all_tasks())
    world.let_answer()

    await eventually(lambda: world.used_bytes == world.queue.in_progress == 0)


async def test_tensor_is_sent_again_if_triton_is_being_stopped_or_the_model_was_replaced(world: World) -> None:
    world.fake.next_refusals = [STOPPING]
    assert (await ask_tensor(world)).version == "1"
    world.fake.config, world.fake.model_versions = config_with(labels="new,other"), ["2"]
    assert (await ask_tensor(world)).version == "2"
    world.fake.config = {**CONFIG, "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [64, 64, 3]}]}
    world.fake.model_versions = ["3"]
    with pytest.raises(MalformedRequest, match=r"of shape \[64, 64, 3\]"):
        await ask_tensor(world)
