"""Tensors of callers: their admission, memory, deadline, circuit and retries are those of images."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import grpc
import numpy as np
import pytest

from app.errors import CircuitOpen, DeadlinePassed, InferenceFailed, MalformedRequest
from app.pipeline.call import CallContext
from app.pipeline.tensors import run_tensor
from app.resilience.deadline import Deadline
from app.telemetry.timing import Timing
from app.triton.messages import InferResult
from tests.fakes.triton import CONFIG, config_with, infer_response
from tests.support import eventually
from tests.world import Time, World

pytestmark = pytest.mark.world(mode="inline")

SIDE = 32
ROWS = np.arange(12, dtype=np.float32).reshape(2, 6)


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


async def test_a_tensor_takes_the_place_of_an_image(world: World) -> None:
    world.fake.may_answer.clear()
    task = asyncio.create_task(ask(world))
    await eventually(lambda: world.running == [1])
    assert world.admission.memory.used_bytes == SIDE * SIDE * 3
    assert world.queue.in_progress == 1
    world.fake.may_answer.set()
    result = await task

    np.testing.assert_array_equal(result.outputs["output0"], ROWS)
    assert (world.admission.memory.used_bytes, world.queue.in_progress) == (0, 0)


async def test_a_tensor_has_a_deadline(world: World, time: Time) -> None:
    world.fake.may_answer.clear()
    task = asyncio.create_task(ask(world, seconds=5))
    await eventually(lambda: world.running == [1])
    await time.skip(6)
    with pytest.raises(DeadlinePassed):
        await task


@pytest.mark.parametrize(
    "wrong", [{"name": "picture"}, {"datatype": "FP32"}, {"shape": (SIDE, SIDE)}, {"shape": (1, SIDE, SIDE, 3)}]
)
async def test_another_tensor_is_not_sent(world: World, wrong: dict[str, Any]) -> None:
    with pytest.raises(MalformedRequest, match=r"the input of tiny is image, UINT8, of shape \[32, 32, 3\]"):
        await ask(world, **wrong)
    assert world.fake.requests == []
    assert world.admission.memory.used_bytes == 0


async def test_a_tensor_is_not_sent_while_the_circuit_is_open(world: World) -> None:
    await ask(world)
    served = world.server.model("tiny")
    assert served.circuit is not None
    served.circuit.open()
    with pytest.raises(CircuitOpen):
        await ask(world)


async def test_the_images_of_a_tensor_fail_together(world: World) -> None:
    world.fake.config = {**CONFIG, "max_batch_size": 4}
    world.fake.answer = infer_response(output0=ROWS[None])
    assert (await ask(world, images=3)).outputs["output0"].shape == (3, 2, 6)

    world.fake.refusal = grpc.StatusCode.INTERNAL, "the model is broken"
    with pytest.raises(InferenceFailed):
        await ask(world, images=3)
    await eventually(lambda: world.admission.memory.used_bytes == 0)


async def test_a_tensor_is_sent_again_if_triton_is_being_stopped(world: World) -> None:
    world.fake.next_refusals = [(grpc.StatusCode.UNAVAILABLE, "Server is stopping")]

    np.testing.assert_array_equal((await ask(world)).outputs["output0"], ROWS)
    assert world.fake.next_refusals == []


async def test_a_tensor_is_sent_to_the_model_that_has_replaced_another(world: World) -> None:
    await ask(world)
    world.fake.config, world.fake.model_versions = config_with(labels="new,other"), ["2"]
    assert (await ask(world)).version == "2"


async def test_a_tensor_is_not_sent_to_a_model_that_takes_others(world: World) -> None:
    await ask(world)
    world.fake.config = {**CONFIG, "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [64, 64, 3]}]}
    world.fake.model_versions = ["2"]
    with pytest.raises(MalformedRequest, match=r"of shape \[64, 64, 3\]"):
        await ask(world)


async def test_outputs_of_different_shapes_are_no_batch(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model may find another number of objects in each image."""
    world.fake.config = {**CONFIG, "max_batch_size": 4}
    rows = iter((1, 2))

    async def run(*_: object) -> InferResult:
        return InferResult({"output0": np.zeros((1, next(rows), 6), np.float32)}, "1")

    monkeypatch.setattr(world.pipeline, "run_tensor", run)
    with pytest.raises(MalformedRequest, match="one image per request"):
        await ask(world, images=2)


async def test_a_model_stays_loaded_while_a_tensor_uses_it(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[tuple[str, list[int]]] = []

    @contextmanager
    def using(model: str) -> Iterator[None]:
        yield
        used.append((model, [request.id == "abc" for request in world.fake.requests]))

    monkeypatch.setattr(world.pipeline, "using", using)
    await ask(world)
    assert used == [("tiny", [True])]
