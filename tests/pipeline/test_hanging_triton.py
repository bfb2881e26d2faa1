"""What opens the circuit of a model at one Triton: failures in a row, inferences that hang, and silence."""

import asyncio
from typing import Any

import msgspec
import pytest

from app.errors import DeadlinePassed
from app.resilience.worker_table import COUNTER, SEPARATOR
from app.telemetry.metrics import MODEL_DEATHS
from app.triton import client as client_module
from app.triton.shared_memory import SHM
from app.triton.silence import Silence
from app.triton.status import ModelDied
from tests.fakes.triton import SPEC
from tests.pipeline import refusals
from tests.pipeline.conftest import fail, is_closed
from tests.pipeline.refusals import Refusal
from tests.support import METRICS, eventually
from tests.world import HANG_SECONDS, World

pytestmark = pytest.mark.world(mode="inline")
SHARED = pytest.mark.world(mode="auto")
HEARD = pytest.mark.usefixtures("heard")
OTHER = msgspec.structs.replace(SPEC, name="other")


@pytest.fixture
def heard(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton does not count as silent, however late a busy machine lets it answer."""
    monkeypatch.setattr(Silence, "ask", lambda *_: None)


@pytest.mark.parametrize("refusal", [refusals.STOPPING, refusals.CANCELLED])
async def test_failures_open_the_circuit_until_a_probe_is_answered(world: World, refusal: Refusal) -> None:
    await fail(world, 4, refusal)
    assert is_closed(world)
    world.fake.refusal = refusal
    await fail(world, 1, refusal)
    assert not is_closed(world)
    assert is_closed(world, "other")
    asked = len(world.fake.requests)
    for probes in (1, 2):
        await world.time.skip(1)
        await eventually(lambda probes=probes: len(world.fake.requests) >= asked + probes)  # type: ignore[misc]
    assert not is_closed(world)
    world.fake.refusal = None

    await eventually(lambda: is_closed(world))
    assert {request.id for request in world.fake.requests[asked:]} == {"probe"}


async def test_request_that_succeeds_at_second_try_is_no_failure(world: World) -> None:
    for _ in range(2):
        await fail(world, 4, refusals.CANCELLED)  # which is not tried again
        world.fake.next_refusals = [refusals.BROKEN]
        await world.infer()

    assert is_closed(world)


async def test_dead_process_of_a_model_is_counted_and_opens_the_circuit(world: World) -> None:

    def deaths() -> int:
        return METRICS.table.total_ever(METRICS.table.column(COUNTER + SEPARATOR.join((MODEL_DEATHS, "tiny"))))

    before = deaths()
    world.fake.refusal = refusals.SICK
    with pytest.raises(ModelDied):
        await world.infer()
    assert not is_closed(world)
    assert deaths() == before + 1


@HEARD
@pytest.mark.parametrize(
    ("how", "opens"),
    [
        ("missed deadlines", True),
        ("callers leave", True),
        ("answered before", True),
        ("fills the limit", True),
        ("other model answered", True),
        ("other image answered", False),
        ("answered late", False),
    ],
)
async def test_inferences_that_hang_open_the_circuit_unless_triton_answers_others(world: World, how: str, *, opens: bool) -> None:
    images = 5
    if how in {"answered before", "fills the limit"}:
        await world.infer()
    if how == "fills the limit":  # no more requests would be admitted
        world.queue.limit, images = 2.0, 2
    world.hold()
    world.fake.held = {"hang", "probe"}
    if how == "callers leave":
        await world.leave(await world.start(images, request_id="hang"))
    else:
        await world.give_up(images, request_id="hang")
    assert is_closed(world)
    if how == "answered late":
        await world.settle()
    elif how.startswith("other"):
        await world.infer(spec=OTHER if "model" in how else None)
    await world.time.skip(HANG_SECONDS)
    assert is_closed(world) is not opens
    assert world.fake.cancelled == 0
    world.let_answer()

    await eventually(lambda: is_closed(world))


@HEARD
@pytest.mark.parametrize(("part", "opens"), [(0.7, True), (0.3, False), pytest.param(0.3, True, marks=SHARED)])
async def test_cancelled_inference_counts_if_it_was_given_half_of_the_time_of_a_hang(
    world: World, part: float, *, opens: bool
) -> None:
    """One with a slot is not cancelled."""
    await world.set_version("2.59.1")
    world.hold()
    await world.give_up(5, part * HANG_SECONDS)
    await world.round_trip()
    await world.time.skip(HANG_SECONDS)

    assert is_closed(world) is not opens
    await eventually(lambda: world.fake.cancelled == (5 if world.slot is None else 0))


@HEARD
async def test_inference_that_fails_late_counts_once(world: World) -> None:
    world.hold()
    world.fake.refusal = refusals.STOPPING
    await world.give_up(4)
    await world.settle()
    await world.time.skip(HANG_SECONDS)
    assert is_closed(world)

    await fail(world, 1)
    assert not is_closed(world)


@HEARD
@SHARED
async def test_end_of_an_unanswered_call_is_no_answer(world: World) -> None:
    with await world.admit():
        before = world.queue.limit
    for _ in range(4):
        world.hold()
        await world.give_up()
        assert world.slot
        arena = world.slot.arena
        world.fake.next_refusals = [refusals.UNANSWERED]
        await world.settle()
        await eventually(lambda arena=arena: not (SHM / arena.name).exists())  # type: ignore[misc]
    assert is_closed(world)
    assert world.queue.limit == before
    await fail(world, 1, refusals.UNANSWERED)

    assert not is_closed(world)
    assert {request.id for request in world.fake.requests} <= {"id", "probe"}


async def test_lost_inference_gives_everything_back_at_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its RPC is given up a minute after its deadline, but not cancelled, because this Triton would not survive that."""
    monkeypatch.setattr(client_module, "_BACKSTOP_SECONDS", 60.0)
    world.hold()
    world.fake.held = {"lost"}
    await world.give_up(request_id="lost")
    assert world.queue.in_progress == 1
    await world.infer()
    await world.time.skip(60)

    await eventually(lambda: world.queue.in_progress == 0)
    assert world.fake.cancelled == 0
    assert is_closed(world)


async def fall_silent(world: World, images: int, seconds: float = 20) -> list[asyncio.Task[Any]]:
    """Stop all answers of Triton while inferences are under way; return once Triton was asked whether it answers."""
    world.hold()
    world.fake.may_tell.clear()
    asked = world.fake.server_reads
    asking = await world.start(images, seconds)
    await world.time.skip(1)
    await eventually(lambda: world.fake.server_reads > asked)
    return asking


@pytest.mark.parametrize("version", [pytest.param("2.51.0", marks=SHARED), "2.59.1"])
async def test_deadlines_missed_while_triton_answers_nothing_open_the_circuit(world: World, version: str) -> None:
    await world.set_version(version)
    await world.infer()
    with await world.admit():
        limit = world.queue.limit
    asking = await fall_silent(world, 4)
    assert not world.pool.is_silent("tiny")
    await world.time.skip(20)
    await asyncio.gather(*asking, return_exceptions=True)
    assert is_closed(world)
    assert world.pool.is_silent("tiny")
    await world.give_up(1, 1)
    assert not is_closed(world)
    world.let_answer()

    await eventually(lambda: is_closed(world) and not world.server.silence.missed)
    await world.settle()
    assert world.queue.limit == limit  # what waited for Triton is no measure of its speed
    await world.infer()


async def test_images_that_waited_for_a_silent_triton_count_as_missed(world: World) -> None:
    """When the call before them is given up, too little time is left for a call of their own."""
    world.hold()
    asking = await world.start(2)
    await world.time.skip(4)
    world.let_answer()
    await asyncio.gather(*asking)
    world.max_calls = 1
    asking = await fall_silent(world, 1, 5)
    asking += [asyncio.create_task(world.infer(5)) for _ in range(4)]
    await eventually(lambda: world.queue.in_progress == 5)
    await world.time.skip(4)
    missed = await asyncio.gather(*asking, return_exceptions=True)

    assert [type(error) for error in missed] == [DeadlinePassed] * 5
    assert not is_closed(world)
    world.let_answer()


async def test_question_without_an_answer_opens_the_circuit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.until_known()
    monkeypatch.setattr(client_module, "_QUERY_SECONDS", 0.1)
    await world.infer(spec=OTHER)
    asking = await fall_silent(world, 1, 1000)
    await eventually(lambda: not is_closed(world))
    assert is_closed(world, "other")
    world.let_answer()

    await asyncio.gather(*asking)
    await eventually(lambda: is_closed(world))


@HEARD
async def test_end_waits_for_no_inference_that_hangs_and_ends_probing(world: World) -> None:
    """They may never end while the circuit of their model is open."""
    world.hold()
    await world.give_up(5)
    await world.time.skip(HANG_SECONDS)
    assert not is_closed(world)
    await world.batchers.close(3600)
    asked = len(world.fake.requests)
    await world.time.skip(10)
    await world.round_trip()

    assert len(world.fake.requests) == asked
    assert not any("CircuitBreaker" in repr(task) for task in asyncio.all_tasks())
