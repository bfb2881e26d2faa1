"""Calls to two Tritons, one of which fails, hangs, is restarted or runs on another host."""

import asyncio

import numpy as np
import pytest

from app.errors import DeadlinePassed
from tests.fakes.triton import CONFIG, FakeTriton, infer_response
from tests.pipeline import refusals
from tests.pipeline.refusals import Refusal
from tests.support import eventually
from tests.world import HANG_SECONDS, World

CONFIG_OF_BATCHES = {**CONFIG, "max_batch_size": 4}


class AnsweringTriton(FakeTriton):
    """Answers batches of any size."""

    def __init__(self) -> None:
        super().__init__()
        self.config = CONFIG_OF_BATCHES

    async def ModelInfer(self, request: object, context: object) -> object:  # noqa: N802
        images = request.inputs[0].shape[0]  # type: ignore[attr-defined]
        self.answer = infer_response(output0=np.zeros((images, 2, 6), np.float32))
        return await super().ModelInfer(request, context)

    @property
    def batches(self) -> list[int]:
        """The number of images in each call, without those of probes."""
        return [request.inputs[0].shape[0] for request in self.requests if request.id != "probe"]

    @property
    def images(self) -> int:
        """The number of images in all calls, without those of probes."""
        return sum(self.batches)


pytestmark = pytest.mark.world(AnsweringTriton, AnsweringTriton, mode="inline", max_calls=1)


@pytest.fixture
async def world(world: World) -> World:
    """A world whose worker knows both Tritons."""
    await world.until_known()
    return world


async def until_busy(world: World) -> None:
    """Send images until the first Triton has had one."""
    while not world.fake.batches:
        await world.infer()


@pytest.mark.parametrize("refusal", [refusals.FULL, refusals.FAILED, refusals.GONE])
async def test_call_that_one_triton_refuses_goes_to_the_other(world: World, refusal: Refusal) -> None:
    """A retry at another Triton needs no budget."""
    world.max_calls = 100
    world.fake.refusal = world.fake.model_refusal = refusal

    assert await world.errors(30) == []
    assert world.fakes[1].images == 30


@pytest.mark.parametrize("refusal", [refusals.STOPPING, refusals.BROKEN])
async def test_triton_that_loses_a_call_is_left_out_at_once(world: World, refusal: Refusal) -> None:
    world.fake.refusal = refusal
    await until_busy(world)
    assert world.usable == [False, True]
    lost = world.fake.images
    assert await world.errors(10) == []
    assert world.fake.images == lost
    world.fake.refusal = None

    await eventually(lambda: world.usable == [True, True])
    assert world.pool.servers[0].model("tiny").speed == 0
    await asyncio.gather(*(world.infer() for _ in range(20)))
    assert world.fake.images > lost


async def test_triton_whose_model_fails_is_left_out_while_another_runs_it(world: World) -> None:
    world.fake.refusal = refusals.FAILED
    while world.usable != [False, True]:
        world.server.model("tiny").forget_speed()  # otherwise it is hardly ever chosen again
        assert await world.errors(1) == []
        await world.until_known()
    failed = world.fake.images
    assert failed >= 5
    asked = len(world.fake.requests)
    for probes in (1, 2):
        await world.time.skip(1)
        await eventually(lambda probes=probes: len(world.fake.requests) >= asked + probes)  # type: ignore[misc]
    assert await world.errors(10) == []
    assert (world.fake.images, world.usable) == (failed, [False, True])
    world.fakes[1].refusal = refusals.FAILED  # then it cannot process the blank image, and Triton is not the cause

    await eventually(lambda: world.usable == [True, True])


async def test_hung_triton_is_left_out_while_the_other_answers(world: World) -> None:
    assert await world.errors(8) == []
    world.fake.may_answer.clear()
    asking = [asyncio.ensure_future(world.infer(100)) for _ in range(2)]
    await eventually(lambda: world.running == [1, 0])
    await world.time.skip(HANG_SECONDS / 2)
    assert await world.errors(1) == []
    assert world.usable == [False, True]
    assert await world.errors(30) == []
    await world.time.skip(100)
    missed = [one for one in await asyncio.gather(*asking, return_exceptions=True) if isinstance(one, BaseException)]
    assert [type(error) for error in missed] == [DeadlinePassed]
    assert world.fake.cancelled == 0
    world.let_answer()

    await eventually(lambda: world.usable == [True, True])
    before = world.fake.images
    assert await world.errors(30) == []
    assert world.fake.images > before


async def test_batches_are_as_large_as_the_triton_takes(world: World) -> None:
    near, far = world.fakes
    far.config = {**CONFIG_OF_BATCHES, "max_batch_size": 2}
    world.pool.servers[1].specs.forget("tiny")
    await world.until_known()
    world.hold()
    asking = asyncio.ensure_future(world.errors(12))
    await eventually(lambda: world.running == [1, 1])
    near.next_refusals = [None, refusals.BROKEN]  # its batch of four cannot go to the other one
    near.may_answer.set()
    await eventually(lambda: len(near.requests) >= 3)
    far.may_answer.set()

    assert await asking == []
    assert near.batches[:3] == [1, 4, 4]
    assert await world.errors(30) == []
    assert [max(fake.batches) for fake in world.fakes] == [4, 2]
