"""Batch requests: memory and outcomes of their images, also after failures and abandonment."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

from app.errors import DeadlinePassed, GatewayFull, InvalidParameter, MalformedRequest
from app.pipeline import preprocess
from app.pipeline.batch_request import BatchRequest, Image
from app.pipeline.call import CallContext, DetectOptions
from app.pipeline.results import Detections
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY
from app.resilience.lease import Lease
from app.resilience.memory import MemoryBudget
from app.telemetry.timing import Timing
from tests.fakes.https import Host, response, serving
from tests.fakes.triton import infer_response
from tests.pipeline.gate import Gate
from tests.support import SCENE, eventually, in_cycles
from tests.world import World

OPTIONS = DetectOptions(None, 0.5, None, 10)
IMAGE = "/scene.bmp"
TABLE = np.array([[0, 0, 8, 8, 0.75, 1], [2, 2, 6, 6, 0.5, 0]], np.float32)

pytestmark = pytest.mark.world(mode="inline", memory_bytes=40 * len(SCENE))


@pytest.fixture
async def host() -> AsyncIterator[Host]:
    async with serving() as made:
        made.answers[IMAGE] = response(SCENE)
        yield made


@pytest.fixture
async def world(world: World, host: Host) -> World:
    world.fake.answer = infer_response(output0=TABLE)
    world.pipeline.fetcher = host.fetcher()
    return world


async def keep(_: int, found: Detections | Exception, timing: Timing) -> Any:  # noqa: ANN401
    """Report the type of the result or error, and the stages."""
    return type(found).__name__, list(timing.stages)


async def explain(_: int, found: Detections | Exception, timing: Timing) -> str:
    assert timing.total >= 0
    return str(found) if isinstance(found, Exception) else type(found).__name__


async def open_batch(
    world: World, images: list[Image], seconds: float = 30, options: DetectOptions = OPTIONS
) -> BatchRequest[Detections]:
    return await BatchRequest.open(world.pipeline, images, options, CallContext(Deadline.after(seconds), Timing(), "abc"))


async def outcomes(batch: BatchRequest[Detections]) -> list[Any]:
    """Return the reports of `keep` in order of completion."""
    async with batch.run(keep) as done:
        return [await image for image in done]


def used(world: World) -> tuple[int, int]:
    return world.admission.memory.used_bytes, world.admission.batch_memory.used_bytes


async def test_images_succeed_and_fail_alone(world: World) -> None:
    images: list[Image] = [SCENE, b"junk", MalformedRequest("no image"), SCENE]
    found = await outcomes(await open_batch(world, images))

    assert sorted(name for name, _ in found) == ["Detections", "Detections", "MalformedRequest", "UnsupportedFormat"]
    for name, stages in found:
        assert (stages == ["model", "queue", "decode", "batch", "infer", "post"]) is (name == "Detections")
    assert images == []
    assert used(world) == (0, 0)


async def test_invalid_option_fails_a_batch_at_once(world: World) -> None:
    with pytest.raises(InvalidParameter):
        await open_batch(world, [SCENE], options=OPTIONS._replace(classes=["unicorn"]))
    assert used(world) == (0, 0)


async def test_images_are_counted_before_triton_is_asked_for_the_model(world: World) -> None:
    world.fake.may_tell.clear()
    waiting = asyncio.create_task(open_batch(world, [SCENE] * 15, 20, OPTIONS._replace(model="other")))
    await eventually(lambda: world.fake.config_reads > 0)
    assert used(world) == (15 * len(SCENE), 15 * len(SCENE))
    reads = world.fake.config_reads
    with pytest.raises(GatewayFull):
        await open_batch(world, [SCENE] * 10, options=OPTIONS._replace(model="another"))

    assert world.fake.config_reads == reads
    await world.time.skip(20)
    with pytest.raises(DeadlinePassed):
        await waiting
    assert used(world) == (0, 0)


@pytest.mark.world(mode="inline", max_requests=2)
async def test_a_batch_that_would_come_too_late_is_rejected(monkeypatch: pytest.MonkeyPatch, world: World, gate: Gate) -> None:
    await outcomes(await open_batch(world, [SCENE] * 5))
    gate.block(monkeypatch, preprocess, "fill_input")
    async with (await open_batch(world, [SCENE] * 15)).run(keep):
        await eventually(lambda: world.admission.waiting_batch_images()["tiny"] > 0)
        before = used(world)
        with pytest.raises(GatewayFull):
            await open_batch(world, [SCENE], seconds=1e-6)
        assert used(world) == before
        gate.opened.set()


async def test_images_are_not_processed_while_the_circuit_is_open(world: World) -> None:
    await world.detect()
    batch = await open_batch(world, [SCENE, b"not an image"])
    served = world.server.model("tiny")
    assert served.circuit is not None
    served.circuit.open()

    assert [name for name, _ in await outcomes(batch)] == ["CircuitOpen"] * 2
    assert used(world) == (0, 0)


async def test_images_that_wait_hold_their_bytes_and_no_pixels(monkeypatch: pytest.MonkeyPatch, world: World, gate: Gate) -> None:
    entered = gate.block(monkeypatch, preprocess, "fill_input")
    async with (await open_batch(world, [SCENE] * 10)).run(keep) as done:
        await eventually(gate.reached.is_set)
        images, batches = used(world)
        assert batches == 10 * len(SCENE)
        assert images <= batches + 10 * world.admission.queues["tiny"].own * 3 * 32 * 32
        assert len(entered) == 1
        gate.opened.set()
        assert [name for name, _ in [await image for image in done]] == ["Detections"] * 10
    assert used(world) == (0, 0)


async def test_a_batch_that_is_abandoned_keeps_its_memory_until_its_thread_has_ended(
    monkeypatch: pytest.MonkeyPatch, world: World, gate: Gate
) -> None:
    entered = gate.block(monkeypatch, preprocess, "fill_input")
    async with (await open_batch(world, [SCENE] * 10)).run(keep):
        await eventually(gate.reached.is_set)
    assert used(world)[1] == 10 * len(SCENE)
    gate.opened.set()

    await eventually(lambda: used(world) == (0, 0))
    assert (len(entered), world.fake.requests) == (1, [])
    assert world.admission.queues["tiny"].in_progress == 0


async def test_images_that_are_not_done_in_time_fail(monkeypatch: pytest.MonkeyPatch, world: World, gate: Gate) -> None:
    gate.block(monkeypatch, preprocess, "fill_input")
    async with (await open_batch(world, [SCENE] * 5, 20)).run(explain) as done:
        await eventually(gate.reached.is_set)
        await world.round_trip()
        await world.time.skip(20)
        found = Counter([await image for image in done])

    assert found == {"the request took too long in the gateway": 5}
    gate.opened.set()
    await eventually(lambda: used(world) == (0, 0))


async def test_batches_take_a_part_of_the_memory(world: World) -> None:
    async with (await open_batch(world, [SCENE] * 30)).run(keep) as done:
        with pytest.raises(GatewayFull) as raised:
            await outcomes(await open_batch(world, [SCENE]))
        assert raised.value.reason == "memory"
        assert str(raised.value) == "the gateway has no memory left for the images of this batch"
        assert [name for name, _ in [await image for image in done]] == ["Detections"] * 30
    assert [name for name, _ in await outcomes(await open_batch(world, [SCENE]))] == ["Detections"]


async def test_an_image_waits_for_memory(world: World) -> None:
    others = world.admission.memory.reserve(ANYBODY)
    for seconds, outcome in ((30, "Detections"), (20, "GatewayFull")):
        others.add(world.admission.memory.limit_bytes - len(SCENE))
        waiting = asyncio.ensure_future(outcomes(await open_batch(world, [SCENE], seconds)))
        await world.round_trip()
        assert not waiting.done()
        if outcome == "Detections":
            others.release()
        else:
            await world.time.skip(seconds)
        assert [name for name, _ in await waiting] == [outcome]
    others.release()
    assert used(world) == (0, 0)


@pytest.mark.parametrize("part", ["memory", "batch_memory"])
async def test_an_address_waits_for_memory(world: World, host: Host, part: str) -> None:
    budget: MemoryBudget = getattr(world.admission, part)
    others = budget.reserve(ANYBODY)
    others.add(budget.limit_bytes - 100)  # the address itself has room
    waiting = asyncio.ensure_future(outcomes(await open_batch(world, [host.url(IMAGE)])))
    await eventually(lambda: len(host.requests) == 1 and not host.open_connections)
    await world.round_trip()
    assert not waiting.done()
    others.release()
    assert await waiting == [("Detections", ["fetch", "model", "queue", "decode", "batch", "infer", "post"])]
    assert len(host.requests) == 2

    others.add(budget.limit_bytes - 100)
    waiting = asyncio.ensure_future(outcomes(await open_batch(world, [host.url(IMAGE)], 20)))
    await eventually(lambda: len(host.requests) == 3 and not host.open_connections)
    await world.round_trip()
    await world.time.skip(20)
    assert await waiting == [("GatewayFull", [])]
    others.release()
    assert used(world) == (0, 0)


async def test_an_address_waits_for_the_images_before_it(world: World, host: Host) -> None:
    slots = world.pipeline.fetcher.batch_slots
    held = 0
    while not slots.locked():
        await slots.acquire()
        held += 1
    waiting = asyncio.ensure_future(outcomes(await open_batch(world, [host.url(IMAGE)], 20)))
    await world.round_trip()
    await world.time.skip(20)
    assert await waiting == [("DeadlinePassed", [])]
    assert not host.requests

    waiting = asyncio.ensure_future(outcomes(await open_batch(world, [host.url(IMAGE)])))
    await world.round_trip()
    assert not host.requests
    for _ in range(held):
        slots.release()
    assert (await waiting)[0][0] == "Detections"


async def test_errors_keep_no_image(world: World) -> None:
    with in_cycles(CallContext) as kept:
        await outcomes(await open_batch(world, [SCENE[:500], b"junk", SCENE]))

    assert not kept


async def test_slots_bound_how_many_images_are_asked_about_at_a_time(world: World) -> None:
    slots, goes_on, running, most = asyncio.Semaphore(2), asyncio.Event(), 0, 0

    async def ask(image: bytes, _: CallContext, __: Lease) -> int:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await goes_on.wait()
        running -= 1
        return len(image)

    async def open_it(seconds: float) -> BatchRequest[int]:
        call = CallContext(Deadline.after(seconds), Timing(), "abc")
        return await BatchRequest.open_with(world.pipeline, [SCENE] * 5, "tiny", ask, call, slots=slots)

    async def report(_: int, found: int | Exception, __: Timing) -> int | str:
        return str(found) if isinstance(found, Exception) else found

    async with (await open_it(20)).run(report) as done:
        await eventually(lambda: running == 2)
        await world.time.skip(20)
        first = [await next(done) for _ in range(3)]
        goes_on.set()
        assert [await image for image in done] == [len(SCENE)] * 2
    assert first == ["the images before it took too long"] * 3
    async with (await open_it(20)).run(report) as done:
        assert [await image for image in done] == [len(SCENE)] * 5
    assert (most, used(world)) == (2, (0, 0))
