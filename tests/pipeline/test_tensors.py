"""Tensors of callers: their admission, memory, deadline, circuit and retries are those of images."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from app.errors import CircuitOpen, DeadlinePassed, InferenceFailed, MalformedRequest
from app.pipeline.call import CallContext
from app.pipeline.tensors import run_tensor
from app.resilience.deadline import Deadline
from app.telemetry.timing import Timing
from app.triton.messages import InferResult
from tests.fakes.triton import CONFIG, config_with, infer_response
from tests.pipeline import refusals
from tests.support import eventually
from tests.world import World

pytestmark = pytest.mark.world(mode="inline")

SIDE = 32
ROWS = np.arange(12, dtype=np.float32).reshape(2, 6)
BATCHES = CONFIG | {"max_batch_size": 4}


@pytest.fixture(autouse=True)
def answer(world: World) -> None:
    world.fake.answer = infer_response(output0=ROWS)


async def ask(world: World, images: int | None = None, seconds: float = 20, **others: Any) -> InferResult:  # noqa: ANN401
    shape = (SIDE, SIDE, 3) if images is None else (images, SIDE, SIDE, 3)
    declared = others.get("name", "image"), others.get("datatype", "UINT8"), others.get("shape", shape)

    async def read(dtype: Any, count: int) -> Any:  # noqa: ANN401
        return np.zeros(count, dtype)

    call = CallContext(Deadline.after(seconds), Timing(), "abc")
    return (await run_tensor(world.pipeline, "tiny", None, declared, read, call))[1]


@pytest.mark.parametrize("is_late", [False, True])
async def test_tensor_takes_the_place_of_an_image_until_its_deadline(world: World, *, is_late: bool) -> None:
    world.hold()
    task = asyncio.create_task(ask(world, seconds=5))
    await eventually(lambda: world.running == [1])
    assert (world.used_bytes, world.queue.in_progress) == (SIDE * SIDE * 3, 1)
    if is_late:
        await world.time.skip(6)
        with pytest.raises(DeadlinePassed):
            await task
    world.let_answer()
    if not is_late:
        np.testing.assert_array_equal((await task).outputs["output0"], ROWS)

    await eventually(lambda: world.used_bytes == world.queue.in_progress == 0)


@pytest.mark.parametrize(
    "wrong", [{"name": "picture"}, {"datatype": "FP32"}, {"shape": (SIDE, SIDE)}, {"shape": (1, SIDE, SIDE, 3)}]
)
async def test_other_tensor_is_not_sent(world: World, wrong: dict[str, Any]) -> None:
    with pytest.raises(MalformedRequest, match=r"the input of tiny is image, UINT8, of shape \[32, 32, 3\]"):
        await ask(world, **wrong)
    assert (world.fake.requests, world.used_bytes) == ([], 0)


async def test_tensor_is_not_sent_while_the_circuit_is_open(world: World) -> None:
    await ask(world)
    world.server.model("tiny").circuit.open()  # type: ignore[union-attr]
    with pytest.raises(CircuitOpen):
        await ask(world)


async def test_images_of_a_tensor_fail_together(world: World) -> None:
    """The others are cancelled, and leave nothing."""
    world.fake.config = BATCHES
    world.fake.answer = infer_response(output0=ROWS[None])
    assert (await ask(world, images=3)).outputs["output0"].shape == (3, 2, 6)
    world.fake.may_answer.clear()
    world.fake.held = {"abc,abc"}
    world.fake.next_refusals = [refusals.FAILED]
    with pytest.raises(InferenceFailed):
        await ask(world, images=4)
    assert not any("run_tensor" in repr(task) for task in asyncio.all_tasks())
    world.let_answer()

    await eventually(lambda: world.used_bytes == world.queue.in_progress == 0)


async def test_tensor_is_sent_again_if_triton_is_being_stopped_or_the_model_was_replaced(world: World) -> None:
    world.fake.next_refusals = [refusals.STOPPING]
    assert (await ask(world)).version == "1"
    world.fake.config, world.fake.model_versions = config_with(labels="new,other"), ["2"]
    assert (await ask(world)).version == "2"
    world.fake.config = {**CONFIG, "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [64, 64, 3]}]}
    world.fake.model_versions = ["3"]
    with pytest.raises(MalformedRequest, match=r"of shape \[64, 64, 3\]"):
        await ask(world)


async def test_outputs_of_different_shapes_are_no_batch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may find another number of objects in each image."""
    world.fake.config = BATCHES
    rows = iter((1, 2))

    async def run(*_: object) -> InferResult:
        return InferResult({"output0": np.zeros((1, next(rows), 6), np.float32)}, "1")

    monkeypatch.setattr(world.pipeline, "run_tensor", run)
    with pytest.raises(MalformedRequest, match="one image per request"):
        await ask(world, images=2)


async def test_model_stays_loaded_while_a_tensor_uses_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[str, list[int]]] = []

    @contextmanager
    def using(model: str) -> Iterator[None]:
        yield
        used.append((model, [request.id == "abc" for request in world.fake.requests]))

    monkeypatch.setattr(world.pipeline, "using", using)
    await ask(world)
    assert used == [("tiny", [True])]
