"""Cascades whose models hang or fail, whose clients leave, and which share models with others."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest

from app.cascade.definition import Cascade
from app.cascade.run import CascadeAnswer, run_cascade
from app.errors import DeadlinePassed, GatewayFull
from app.imaging.patch import Patch
from app.pipeline import preprocess
from app.pipeline.call import CallContext
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, Caller
from app.telemetry.timing import Timing
from tests.fakes.models import SIZE
from tests.fakes.triton import CONFIG, FakeTriton, infer_response
from tests.support import METRICS, SCENE, eventually, in_cycles
from tests.world import Gate, World, open_world

OBJECTS = 300
SECONDS = 20.0
IMAGE_BYTES = SIZE[0] * SIZE[1] * 3
INNER = {"model": "second", "of": "things"}
STEPS = {"things": {"model": "tiny"}, "other": {"model": "third"}, "inner": INNER}


class Finding(FakeTriton):
    """Finds as many objects as can be cropped, whatever it is asked."""

    def __init__(self) -> None:
        super().__init__()
        self.config = CONFIG | {"output": [{"name": "output0", "data_type": "TYPE_FP32", "dims": [OBJECTS, 6]}]}
        found = np.tile(np.array([4, 9, 28, 22, 0.9, 0], np.float32), (OBJECTS, 1))
        self.answer = infer_response(output0=found)
        self.held = {"abc-inner"}

    @property
    def ids(self) -> list[str]:
        return [request.id for request in self.requests]


@pytest.fixture
async def world() -> AsyncIterator[World]:
    async with open_world(Finding(), max_requests=2) as made:
        yield made
        await made.settle()
        await eventually(lambda: not made.used_bytes)
        assert [queue.in_progress for queue in made.admission.queues.values()] == [0] * len(made.admission.queues)


async def run(world: World, steps: Any = STEPS, caller: Caller = ANYBODY) -> CascadeAnswer:  # noqa: ANN401
    call = CallContext(Deadline.after(SECONDS), Timing(), "abc", caller)
    cascade = msgspec.convert({"steps": steps}, Cascade)
    return await run_cascade(world.pipeline, cascade, SCENE, call, METRICS)


def errors(found: CascadeAnswer) -> list[str | None]:
    return [step.error.code if step.error else None for step in found.steps.values()]


async def test_all_crops_are_asked_about_a_few_at_a_time(world: World) -> None:
    found = await run(world, {**STEPS, "again": {**INNER, "margin": 0.1}})
    assert (len(found.steps["inner"].results), found.truncated) == (OBJECTS, True)
    assert found.steps["again"].results == []
    assert world.fake.most_running <= 3  # of three models


@pytest.mark.parametrize("leaves", [True, False])
async def test_step_that_hangs_ends_with_its_client_or_at_the_deadline(world: World, *, leaves: bool) -> None:
    world.hold()
    running = asyncio.create_task(run(world))
    await eventually(lambda: "abc-inner" in world.fake.ids)
    if leaves:
        await world.leave([running])
    else:
        await world.time.skip(SECONDS)
        assert errors(await running) == [None, None, "deadline_passed"]
    await world.settle()
    assert world.fake.ids.count("abc-inner") == 1


async def test_crop_that_fails_fails_its_step_and_keeps_no_image(world: World) -> None:
    with in_cycles(Patch) as patches:
        world.fake.next_refusals = [None, None, *[(grpc.StatusCode.INTERNAL, "broken")] * 10]
        found = await run(world)
        assert errors(found) == [None, None, "inference_failed"]
        assert not [kept for kept in gc.get_objects() if isinstance(kept, Patch)]
    assert patches == []


@pytest.mark.parametrize("how", ["cancelled", "late"])
async def test_memory_of_the_image_is_held_while_a_thread_reads_it(monkeypatch: pytest.MonkeyPatch, world: World, how: str) -> None:
    gate = Gate()
    gate.block(monkeypatch, preprocess, "fill_from_patch")
    running = asyncio.create_task(run(world))
    await eventually(gate.reached.is_set)
    if how == "cancelled":
        running.cancel()
    else:
        await world.time.skip(SECONDS)
    with pytest.raises(asyncio.CancelledError if how == "cancelled" else DeadlinePassed):
        await running
    assert world.used_bytes >= IMAGE_BYTES
    gate.opened.set()
    await eventually(lambda: not world.used_bytes)


async def test_crops_take_no_place_of_others(world: World) -> None:
    world.hold()
    many = [asyncio.create_task(run(world, {"things": STEPS["things"], "inner": INNER}, Caller("many"))) for _ in range(2)]
    await eventually(lambda: world.fake.ids.count("abc-inner") == 2)
    more = asyncio.create_task(run(world, {"things": STEPS["things"], "inner": INNER}, Caller("many")))
    await eventually(lambda: world.admission.queues["second"].waiting == 1)

    assert len((await world.detect(model="second", caller=Caller("few"))).scores) == 100
    with pytest.raises(GatewayFull):
        await world.detect(model="second", caller=Caller("many"))
    await world.leave([*many, more])
