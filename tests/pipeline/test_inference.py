"""Inferences at one Triton: what is tried again, and what stays in use until an RPC has ended."""

import asyncio
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from app.errors import DeadlinePassed, GatewayError, InferenceFailed, InvalidModelOutput, ModelNotReady
from app.model.spec import from_triton_config
from app.pipeline import triton_calls
from app.resilience.fairness import Caller
from app.telemetry.trace_context import TraceContext
from app.triton.shared_memory import SHM
from app.triton.status import Overloaded
from tests.fakes.triton import CONFIG, GONE, SPEC, Refusal, config_with, infer_response
from tests.pipeline.conftest import BROKEN, FULL, LATE, MISSHAPEN, STOPPING, fail, is_closed
from tests.support import eventually
from tests.world import IMAGE, World

TRACE = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1)

pytestmark = [pytest.mark.world(mode="inline"), pytest.mark.usefixtures("_no_delays")]
SHARED = pytest.mark.world(mode="auto")


@pytest.fixture
def _no_delays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_calls, "random", SimpleNamespace(uniform=lambda *_: 0.0))


@pytest.fixture
async def world(world: World) -> World:
    """A world with slots, unless the test wants none, whose model finds two objects."""
    await world.transport.prepare(SPEC.image_bytes)
    world.fake.answer = infer_response(output0=np.ones((2, 6), np.float32))
    return world


def has_slot(request: Any) -> bool:  # noqa: ANN401
    return "shared_memory_region" in request.inputs[0].parameters


@pytest.mark.parametrize(
    ("version", "cancelled"),
    [("2.59.1", 2), ("2.51.0", 0), pytest.param("2.59.1", 0, marks=SHARED)],
    ids=["survives it", "would crash", "reads a slot"],
)
async def test_inference_is_cancelled_only_if_that_is_safe(world: World, version: str, cancelled: int) -> None:
    await world.set_version(version)
    world.hold()
    await world.leave(await world.start())
    await world.give_up()
    await world.round_trip()
    await eventually(lambda: world.fake.cancelled == cancelled)
    assert not (world.slot and world.is_slot_free)
    await world.settle()

    assert not world.slot or world.is_slot_free
    assert world.fake.cancelled == cancelled


@pytest.mark.parametrize(
    ("refusal", "expected", "reads"),
    [
        (FULL, Overloaded, 1),
        (LATE, DeadlinePassed, 1),
        (MISSHAPEN, InferenceFailed, 2),
        (GONE, ModelNotReady, 2),
        (None, InvalidModelOutput, 1),
    ],
)
async def test_answer_is_neither_tried_again_nor_a_failure(
    world: World, refusal: Refusal | None, expected: type[GatewayError], reads: int
) -> None:
    """An overloaded Triton must not get more requests. After some answers, the model may have changed: its spec is read again."""
    specs = world.server.specs
    await specs.get("tiny")
    world.fake.refusal = refusal
    if refusal is None:
        world.fake.answer.raw_output_contents[0] = b""
    for number in range(6):
        with pytest.raises(expected) as caught:
            await world.infer()
        assert type(caught.value) is expected
        if number == 0:
            await specs.get("tiny")
            assert (len(world.fake.requests), world.fake.config_reads) == (1, reads)
    assert is_closed(world)
    await fail(world, 4)
    with pytest.raises(expected):
        await world.infer()
    await fail(world, 4)
    assert is_closed(world)
    await fail(world, 1)

    assert not is_closed(world)


@SHARED
@pytest.mark.parametrize(("refusal", "may_be_read"), [(STOPPING, False), (BROKEN, True)])
async def test_lost_request_is_tried_once_more_without_a_slot(world: World, refusal: Refusal, *, may_be_read: bool) -> None:
    """It is not known which regions Triton has mapped. An arena that it may still read is not used again."""
    world.fake.next_refusals = [refusal]
    answer = await world.infer(trace=TRACE)
    assert world.slot is not None
    arena = world.slot.arena
    assert answer.outputs["output0"].sum() == 12
    first, second = world.fake.requests
    assert (has_slot(first), has_slot(second)) == (True, False)
    assert list(second.raw_input_contents) == [IMAGE.tobytes()]
    assert [metadata["traceparent"] for metadata in world.fake.metadata] == [TRACE.traceparent] * 2
    await world.infer()

    assert (world.slot.arena is not arena) is may_be_read
    assert has_slot(world.fake.requests[-1])
    if may_be_read:
        await eventually(lambda: arena.region not in world.fake.regions and not (SHM / arena.name).exists())


@SHARED
async def test_region_that_triton_has_forgotten_is_mapped_again(world: World) -> None:
    await world.infer()
    world.fake.requests.clear()
    world.fake.regions.clear()
    await world.infer()

    assert [has_slot(request) for request in world.fake.requests] == [True, True]


async def test_few_requests_are_tried_again(world: World) -> None:
    attempts = []
    for _ in range(5):
        world.fake.requests.clear()
        await fail(world, 1, STOPPING)
        attempts.append(len([request for request in world.fake.requests if request.id == "id"]))
    assert attempts == [2, 2, 2, 1, 1]
    for _ in range(10):
        await world.infer()
    world.fake.next_refusals = [STOPPING]

    assert await world.infer()


@pytest.mark.world(max_calls=1)
async def test_images_of_one_shape_share_a_call(world: World) -> None:
    shapes: dict[str, Any] = {"max_batch_size": 2, "input": [{**CONFIG["input"][0], "dims": [-1, -1, 3]}]}
    world.fake.config = config_with(square="64", shapes="64x32", box_units="pixels") | shapes
    spec = from_triton_config(world.fake.config, "1")
    world.hold()
    asking = await world.start(spec=spec)
    asking += [asyncio.create_task(world.infer(spec=spec, size=size)) for size in (*spec.shapes, spec.input_size) * 2]
    await eventually(lambda: len(world.batchers["tiny"].waiting) == 4)
    world.let_answer()
    await asyncio.gather(*asking, return_exceptions=True)  # the answer is that for one image

    assert [[*request.inputs[0].shape] for request in world.fake.requests[1:3]] == [[2, 32, 64, 3], [2, 64, 64, 3]]


@pytest.mark.world(max_calls=2)
async def test_caller_with_no_image_under_way_has_one_extra_call(world: World) -> None:
    world.hold()
    asking = [asyncio.create_task(world.infer(caller=Caller("a"))) for _ in range(6)]
    await eventually(lambda: world.running == [2])
    asking += await world.start(caller=Caller("b"))
    asking.append(asyncio.create_task(world.infer(caller=Caller("c"))))
    await world.round_trip()
    assert world.running == [3]
    world.let_answer()

    await asyncio.gather(*asking)
