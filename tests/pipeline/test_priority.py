"""Priorities of callers, from a request to Triton."""

import asyncio
from typing import Any

import numpy as np
import pytest

from app.pipeline.call import CallContext
from app.resilience.deadline import Deadline
from app.resilience.fairness import HIGH, LOW, Caller
from app.telemetry.timing import Timing
from tests.fakes.triton import infer_response
from tests.support import METRICS, SCENE, eventually
from tests.world import OPTIONS, World


async def served(world: World, patch: pytest.MonkeyPatch, *callers: Caller) -> tuple[str, dict[str, int]]:
    """Send requests to a busy gateway; return their callers in the order of the calls, and Triton's priorities of all."""
    world.fake.config = {**world.fake.config, "dynamic_batching": {"priority_levels": "3", "default_priority_level": "2"}}
    world.fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    world.hold()
    infer, order, asking = world.client.infer, "", list[asyncio.Task[object]]()

    async def recorded(*given: Any, **options: Any) -> Any:  # noqa: ANN401
        nonlocal order
        order += options["request_id"][0]
        return await infer(*given, **options)

    async def ask(caller: Caller, waiting: int) -> None:
        call = CallContext(Deadline.after(60), Timing(), f"{caller.name}{len(asking)}", caller)
        asking.append(asyncio.create_task(world.pipeline.run(SCENE, OPTIONS, call)))

        def are_waiting() -> bool:
            world.pipeline.sample()
            return len(order) + waiting == len(asking) and METRICS.nonzero(METRICS.waiting_images).get("tiny", 0) == waiting

        await eventually(are_waiting)

    patch.setattr(world.client, "infer", recorded)
    for name in "xxxxy":  # the four calls that there may be, and an extra one
        await ask(Caller(name), 0)
    for waiting, caller in enumerate(callers):
        await ask(caller, waiting + 1)
    world.let_answer()
    await asyncio.gather(*asking)
    world.pipeline.sample()
    return order.lstrip("xy"), {request.id[0]: request.parameters["priority"].uint64_param for request in world.fake.requests}


async def test_a_busy_gateway_serves_higher_priorities_first(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    callers = [Caller("l", priority=LOW), Caller("m", priority=LOW), Caller("n"), Caller("h", priority=HIGH)]
    order, priorities = await served(world, monkeypatch, *callers, *callers)

    assert order == "hhnnlmlm"
    assert priorities == {"x": 0, "y": 1, "h": 1, "n": 0, "l": 3, "m": 3}


async def test_without_priorities_callers_take_turns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    callers = [Caller(name) for name in "lmnh"]
    order, _ = await served(world, monkeypatch, *callers, *callers)

    assert order == "lmnhlmnh"
