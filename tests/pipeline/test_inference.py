"""Inferences and their failures, also after their requests have left: slots stay in use until the RPC has ended."""

import asyncio
import gc
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import numpy as np
import psutil
import pytest

from app.embedded.server import EmbeddedTriton
from app.errors import (
    DeadlinePassed,
    GatewayError,
    InferenceFailed,
    InvalidModelOutput,
    ModelNotReady,
    TritonUnavailable,
)
from app.main import create_app
from app.model.spec import ModelSpec
from app.pipeline import triton_calls
from app.pipeline.batch import PendingImage
from app.pipeline.call import CallContext
from app.resilience.deadline import Deadline
from app.resilience.model_queue import Permit
from app.resilience.worker_table import COUNTER, SEPARATOR
from app.settings.schema import Settings
from app.telemetry.metrics import MODEL_DEATHS
from app.telemetry.timing import Timing
from app.telemetry.trace_context import TraceContext
from app.triton import client as client_module
from app.triton.messages import InferResult
from app.triton.shared_memory import SHM, Arena
from app.triton.status import Disconnected, Draining, ModelDied, Overloaded, Unreachable
from app.triton.transport import InputBuffer, Mode
from tests.fakes.triton import SPEC, FakeTriton, infer_response, serving, serving_bytes
from tests.support import METRICS, SCENE, eventually, finds, is_mapped, json, started
from tests.world import HANG_SECONDS, IMAGE, World, open_world

Refusal = tuple[grpc.StatusCode, str]

TRACE = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1)
STOPPING = grpc.StatusCode.UNAVAILABLE, "Server is stopping, scheduler for model has stopped accepting new inference requests"
REFUSED = grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused"
BROKEN = grpc.StatusCode.UNAVAILABLE, "Socket closed"
SICK = grpc.StatusCode.INTERNAL, "Stub process 'tiny_0_0' is not healthy."
LOST = ((STOPPING, Draining), (REFUSED, Unreachable), (BROKEN, Disconnected), (SICK, ModelDied))
"""Errors after which a request is retried."""
ANSWERS: tuple[tuple[Refusal, type[GatewayError]], ...] = (
    ((grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"), Overloaded),
    ((grpc.StatusCode.RESOURCE_EXHAUSTED, "not enough memory"), Overloaded),
    ((grpc.StatusCode.INTERNAL, "Failed to increase the shared memory pool size"), Overloaded),
    ((grpc.StatusCode.UNAVAILABLE, "Request timeout expired"), DeadlinePassed),
    ((grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input"), InferenceFailed),
    ((grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions"), ModelNotReady),
    ((grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"), ModelNotReady),
)
"""Errors from a Triton that works."""

pytestmark = pytest.mark.world(mode="inline")
SHARED = pytest.mark.world(mode="auto")
SHARED_OR_NOT = pytest.mark.parametrize("is_shared", [pytest.param(True, marks=SHARED), False])


@pytest.fixture
async def world(world: World) -> World:
    """A world with slots, unless the test wants none."""
    await world.transport.prepare(SPEC.image_bytes)
    return world


@pytest.fixture
async def unretrieved() -> AsyncIterator[list[dict[str, Any]]]:
    """Exceptions that were never retrieved, as reported by the event loop."""
    loop = asyncio.get_running_loop()
    reports: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: reports.append(context))
    yield reports
    loop.set_exception_handler(None)


async def run(world: World, buffer: InputBuffer, permit: Permit) -> InferResult:
    call = CallContext(Deadline.after(30), Timing(), "id")
    return await world.batchers["tiny"].run(PendingImage(SPEC, buffer, call, permit))


def has_slot(request: Any) -> bool:  # noqa: ANN401
    return "shared_memory_region" in request.inputs[0].parameters


@SHARED_OR_NOT
async def test_an_inference_is_asked_once_and_answered(world: World, is_shared: bool) -> None:  # noqa: FBT001
    world.fake.answer = infer_response(output0=np.ones((2, 6), np.float32))
    answer = await world.infer(100, request_id="abc")

    assert answer.outputs["output0"].sum() == 12
    (request,) = world.fake.requests
    assert request.id == "abc"
    assert 50_000_000 < request.parameters["timeout"].int64_param < 100_000_000
    assert has_slot(request) is is_shared
    assert list(request.raw_input_contents) == ([] if is_shared else [IMAGE.tobytes()])


async def test_triton_is_told_whose_call_it_is(world: World) -> None:
    world.fake.answer = infer_response(output0=np.ones((2, 6), np.float32))
    world.fake.next_refusals = [STOPPING]
    await world.infer(trace=TRACE)
    await world.infer()

    assert [metadata.get("traceparent") for metadata in world.fake.metadata] == [TRACE.traceparent, TRACE.traceparent, None]


@SHARED
async def test_no_time_left_is_no_answer(world: World) -> None:
    for seconds in (0, -5):
        with pytest.raises(DeadlinePassed):
            await world.infer(seconds)
        assert world.is_slot_free

    await world.infer()
    assert len(world.fake.requests) == 1


@SHARED_OR_NOT
@pytest.mark.parametrize("version", ["2.51.0", "2.59.1", None])
async def test_an_inference_is_cancelled_only_if_that_is_safe(world: World, version: str | None, is_shared: bool) -> None:  # noqa: FBT001
    cancelled = 2 if version == "2.59.1" and not is_shared else 0
    await world.set_version(version or "2.59.1")
    world.client.server = world.client.server if version else None
    world.hold()
    await world.leave(await world.start())
    await world.give_up()
    await world.round_trip()
    await eventually(lambda: world.fake.cancelled == cancelled)
    assert not (is_shared and world.is_slot_free)
    await world.settle()

    assert not is_shared or world.is_slot_free
    assert world.fake.cancelled == cancelled


@SHARED
async def test_draining_waits_for_abandoned_inferences(world: World) -> None:
    world.hold()
    await world.give_up()
    draining = asyncio.ensure_future(world.batchers.close(10))
    await world.round_trip()
    assert not draining.done()
    assert not world.is_slot_free
    world.let_answer()
    await draining
    await asyncio.sleep(0)

    assert world.is_slot_free


async def test_an_abandoned_inference_that_fails_is_not_reported(world: World, unretrieved: list[dict[str, Any]]) -> None:
    """Triton drops it at its deadline, when its caller already has the error."""
    world.hold()
    world.fake.refusal = grpc.StatusCode.UNAVAILABLE, "Request timeout expired"
    await world.give_up()
    await world.settle()
    gc.collect()

    assert [report["message"] for report in unretrieved] == []


@SHARED
@pytest.mark.parametrize("refusal", [None, (grpc.StatusCode.UNAVAILABLE, "Request timeout expired")])
async def test_a_late_answer_is_measured(world: World, refusal: Refusal | None) -> None:
    """Inferences that Triton dropped at their deadline count as well; otherwise the limit would stay above the model's capacity."""
    with await world.admit():
        before = world.queue.limit
    world.hold()
    world.fake.refusal = refusal
    await world.give_up()
    assert world.queue.limit == before
    await world.settle()

    assert world.queue.limit > before  # the target is a million seconds


async def test_an_answer_in_time_is_measured_once(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[float] = []
    with await world.admit():
        monkeypatch.setattr(world.queue, "measure", lambda seconds, *_, **__: measured.append(seconds))
    await world.infer()
    await asyncio.sleep(0)

    assert len(measured) == 1


async def test_a_failed_inference_is_not_measured(world: World) -> None:
    """The duration of a rejection is no measure of the model's speed."""
    with await world.admit():
        before = world.queue.limit
    world.fake.refusal = grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"
    with pytest.raises(TritonUnavailable):
        await world.infer()
    await asyncio.sleep(0)

    assert world.queue.limit == before


@SHARED
@pytest.mark.parametrize("accepts_regions", [True, False])
async def test_a_forgotten_region_is_registered_again_or_done_without(world: World, accepts_regions: bool) -> None:  # noqa: FBT001
    world.fake.regions.clear()
    world.fake.accepts_regions = accepts_regions
    assert await world.infer()

    first, second = world.fake.requests
    assert has_slot(first)
    assert has_slot(second) is accepts_regions
    assert list(second.raw_input_contents) == ([] if accepts_regions else [IMAGE.tobytes()])
    assert is_mapped(world.transport) == accepts_regions
    assert world.is_slot_free


@SHARED
async def test_a_late_answer_about_a_forgotten_region_starts_nothing(world: World) -> None:
    registrations = len(world.fake.registrations)
    world.fake.regions.clear()
    world.hold()
    await world.give_up()
    await world.settle()

    assert len(world.fake.requests) == 1
    assert len(world.fake.registrations) == registrations
    assert world.is_slot_free


@SHARED
async def test_a_slow_registration_starts_no_second_inference(world: World) -> None:
    world.fake.regions.clear()
    world.fake.may_map.clear()
    asking = asyncio.ensure_future(world.infer(20))
    await eventually(lambda: len(world.fake.registrations) == 2)
    await world.time.skip(20)
    with pytest.raises(DeadlinePassed):
        await asking
    await world.settle()

    assert len(world.fake.requests) == 1
    assert len(world.fake.regions) == 1
    assert world.is_slot_free


class ForgetfulSet(set[str]):
    """Never contains what was added to it."""

    def add(self, _: str) -> None: ...


@SHARED
async def test_a_region_that_is_forgotten_twice_is_an_unavailable_triton(world: World) -> None:
    """This happens with two Tritons behind one address. The caller may retry; the error is not a missing model."""
    world.fake.regions = ForgetfulSet()
    with pytest.raises(TritonUnavailable):
        await world.infer()

    assert len(world.fake.requests) == 2
    assert world.is_slot_free


@pytest.mark.parametrize(
    ("refusal", "expected", "reads"),
    [
        ((grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"), TritonUnavailable, 1),
        ((grpc.StatusCode.UNAVAILABLE, "Request timeout expired"), DeadlinePassed, 1),
        ((grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input"), InferenceFailed, 2),
        ((grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions"), ModelNotReady, 2),
        ((grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"), ModelNotReady, 2),
    ],
)
async def test_a_failed_inference_lets_the_spec_be_read_again(
    world: World,
    refusal: Refusal,
    expected: type[GatewayError],
    reads: int,
) -> None:
    """The model may have changed, but not after a full queue or a missed deadline."""
    specs = world.server.specs
    await specs.get("tiny")
    world.fake.refusal = refusal
    with pytest.raises(expected):
        await world.infer()

    await specs.get("tiny")
    assert world.fake.config_reads == reads


async def test_an_inconsistent_response_keeps_the_spec(world: World) -> None:
    """The model would contradict its config again: ten such requests read the config once."""
    world.fake.answer = infer_response(output0=np.ones((2, 6), np.float32))
    world.fake.answer.raw_output_contents[0] = b""
    for _ in range(10):
        await world.server.specs.get("tiny")
        with pytest.raises(InvalidModelOutput):
            await world.infer()

    assert len(world.fake.requests) == 10
    assert world.fake.config_reads == 1


class Pixels(np.ndarray[Any, Any]):
    """An array whose instances can be counted."""


@pytest.mark.parametrize("refusal", [(grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input"), BROKEN])
async def test_a_failed_inference_leaves_no_reference_cycle(world: World, refusal: Refusal) -> None:
    """Its image is freed immediately, not when the garbage collector runs, with and without a retry."""
    world.fake.refusal = refusal
    gc.collect()
    gc.disable()
    try:
        for _ in range(8):  # more than the retries that are saved up
            with suppress(InferenceFailed, TritonUnavailable), await world.admit() as permit:
                buffer = InputBuffer(IMAGE.copy().view(Pixels), None)
                await run(world, buffer, permit)
        alive = [thing for thing in gc.get_objects() if isinstance(thing, Pixels)]
    finally:
        gc.enable()

    assert len(alive) <= 1  # of the buffer that is still a name here


def delaying(monkeypatch: pytest.MonkeyPatch, seconds: float) -> list[float]:
    """Set the delay of retries; return a list that gets an entry for each retry."""
    delays: list[float] = []

    def uniform(*_: float) -> float:
        delays.append(seconds)
        return seconds

    monkeypatch.setattr(triton_calls, "random", SimpleNamespace(uniform=uniform))
    return delays


@SHARED_OR_NOT
@pytest.mark.parametrize("refusal", [refusal for refusal, _ in LOST])
async def test_a_request_that_was_lost_is_tried_once_more(world: World, refusal: Refusal, is_shared: bool) -> None:  # noqa: FBT001
    """The retry is inline, because it is not known which regions Triton has mapped and which slots it still reads."""
    world.fake.answer = infer_response(output0=np.ones((2, 6), np.float32))
    world.fake.next_refusals = [refusal]
    answer = await world.infer()

    assert answer.outputs["output0"].sum() == 12
    first, second = world.fake.requests
    assert has_slot(first) is is_shared
    assert not has_slot(second)
    assert list(second.raw_input_contents) == [IMAGE.tobytes()]
    assert first.id == second.id == "id"


@pytest.mark.parametrize(("second", "expected"), [*LOST, *ANSWERS])
async def test_no_request_is_tried_more_than_twice(world: World, second: Refusal, expected: type[GatewayError]) -> None:
    for first in (STOPPING, BROKEN):
        world.fake.requests.clear()
        world.fake.next_refusals = [first, second]
        with pytest.raises(expected) as caught:
            await world.infer()
        assert type(caught.value) is expected
        assert len(world.fake.requests) == 2


@SHARED
async def test_a_forgotten_region_is_the_only_reason_to_try_again(world: World) -> None:
    world.fake.regions.clear()
    world.fake.next_refusals = [None, STOPPING]
    with pytest.raises(Draining):
        await world.infer()

    assert len(world.fake.requests) == 2


@SHARED
@pytest.mark.parametrize(("refusal", "expected"), ANSWERS)
async def test_an_answer_is_no_reason_to_try_again(world: World, refusal: Refusal, expected: type[GatewayError]) -> None:
    """An overloaded Triton must not get more requests."""
    world.fake.next_refusals = [refusal]
    with pytest.raises(expected) as caught:
        await world.infer()

    assert type(caught.value) is expected
    assert len(world.fake.requests) == 1
    assert world.is_slot_free


async def test_the_more_calls_have_failed_the_longer_a_retry_waits(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    longest: list[float] = []

    def uniform(_: float, most: float) -> float:
        longest.append(most)
        return 0.0

    monkeypatch.setattr(triton_calls, "random", SimpleNamespace(uniform=uniform))
    await fail(world, 3, STOPPING)
    await world.infer()
    await fail(world, 1, STOPPING)

    assert longest == [0.05, 0.1, 0.2, 0.05]


async def test_few_requests_are_tried_again(world: World) -> None:
    attempts = []
    world.fake.refusal = STOPPING
    for _ in range(5):
        world.fake.requests.clear()
        with pytest.raises(Draining):
            await world.infer()
        attempts.append(len([request for request in world.fake.requests if request.id == "id"]))

    assert attempts == [2, 2, 2, 1, 1]
    world.fake.refusal = None
    for _ in range(10):
        await world.infer()
    world.fake.next_refusals = [STOPPING]
    assert await world.infer()


async def test_a_request_is_not_tried_again_shortly_before_its_deadline(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fake.next_refusals = [STOPPING] * 5
    delaying(monkeypatch, 30)
    for _ in range(5):
        with pytest.raises(Draining):
            await world.infer(20)
    assert len(world.fake.requests) == 5
    delaying(monkeypatch, 0)
    for _ in range(3):
        world.fake.next_refusals = [STOPPING]
        await world.infer(20)

    assert len(world.fake.requests) == 11


@SHARED
async def test_an_inference_that_nobody_waits_for_is_not_tried_again(world: World) -> None:
    world.hold()
    world.fake.next_refusals = [BROKEN]
    await world.leave(await world.start())
    await world.settle()

    assert len(world.fake.requests) == 1


@pytest.mark.parametrize("mode", ["auto", "inline"])
async def test_a_triton_that_is_started_in_time_answers(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    delays = delaying(monkeypatch, 20)
    fake = FakeTriton()
    async with AsyncExitStack() as stack:
        async with serving(fake) as port:
            world = await stack.enter_async_context(open_world(fake, mode=mode))
            await world.until_known()
            world.hold()
            (asking,) = await world.start()
        await eventually(lambda: fake.cancelled == 1 and world.client.server is None)
        world.let_answer()
        late = asyncio.ensure_future(world.infer())
        await eventually(lambda: len(delays) == 2)
        async with serving(fake, port):
            await eventually(lambda: world.client.server is not None)
            await world.time.skip(20)
            assert (await asking).version == (await late).version == "1"
            assert [has_slot(request) for request in fake.requests] == [mode == "auto", False, False]
            assert is_closed(world)
            await stack.aclose()


@SHARED
async def test_slots_of_a_broken_connection_are_not_used_again(world: World) -> None:
    """Triton may still read them, so the arena is removed and the next request gets a new one."""
    world.hold()
    world.fake.next_refusals = [BROKEN]
    asking = await world.start(8)
    assert world.slot is not None
    arena = world.slot.arena
    world.let_answer()
    await asyncio.gather(*asking)

    assert len(world.fake.requests) == 9
    assert world.transport.take(SPEC.image_bytes, SPEC.image_bytes) is None
    await eventually(lambda: arena.region not in world.fake.regions and not (SHM / arena.name).exists())
    await world.infer()
    assert world.slot.arena is not arena
    assert has_slot(world.fake.requests[-1])


@SHARED
@pytest.mark.parametrize("refusal", [STOPPING, REFUSED, SICK])
async def test_slots_that_triton_does_not_read_stay_in_use(world: World, refusal: Refusal) -> None:
    world.fake.next_refusals = [refusal]
    with suppress(TritonUnavailable):
        await world.infer()
    assert world.slot is not None
    arena = world.slot.arena
    await world.infer()

    assert world.slot.arena is arena


async def fail(world: World, times: int, refusal: Refusal = SICK, spec: ModelSpec = SPEC) -> None:
    for _ in range(times):
        before, world.fake.refusal = world.fake.refusal, refusal
        with pytest.raises(GatewayError):
            await world.infer(spec=spec)
        world.fake.refusal = before


def is_closed(world: World, model: str = "tiny") -> bool:
    return world.pool.is_usable(model)


@pytest.mark.parametrize(
    "refusal", [STOPPING, REFUSED, BROKEN, SICK, (grpc.StatusCode.CANCELLED, ""), (grpc.StatusCode.UNAVAILABLE, "GOAWAY received")]
)
async def test_failures_open_the_circuit_of_their_model(world: World, refusal: Refusal) -> None:
    await fail(world, 4, refusal)
    assert is_closed(world)
    await fail(world, 1, refusal)

    assert not is_closed(world)
    assert is_closed(world, "other")


async def test_an_answer_to_the_probe_closes_the_circuit(world: World) -> None:
    world.fake.refusal = SICK
    await fail(world, 5)
    assert not is_closed(world)
    asked = len(world.fake.requests)
    for probes in (1, 2):
        await world.time.skip(1)
        await eventually(lambda probes=probes: len(world.fake.requests) >= asked + probes)  # type: ignore[misc]
    assert not is_closed(world)
    world.fake.refusal = None

    await eventually(lambda: is_closed(world))
    assert {request.id for request in world.fake.requests[asked:]} == {"probe"}
    assert not any(map(has_slot, world.fake.requests[asked:]))


async def test_dead_processes_of_a_model_are_counted(world: World) -> None:
    """Probes also count, because `serve` needs the count while the circuit is open and there are no other calls."""

    def deaths() -> int:
        return METRICS.table.total_ever(METRICS.table.column(COUNTER + SEPARATOR.join((MODEL_DEATHS, "tiny"))))

    before = deaths()
    world.fake.next_refusals = [SICK]
    await world.infer()
    assert deaths() == before + 1
    world.fake.refusal = SICK
    await fail(world, 5)
    assert not is_closed(world)
    seen = deaths()
    await world.time.skip(1)

    await eventually(lambda: deaths() > seen)


@pytest.mark.parametrize("refusal", [refusal for refusal, _ in ANSWERS])
async def test_an_answer_never_counts_as_a_failure(world: World, refusal: Refusal) -> None:
    await fail(world, 30, refusal)
    assert is_closed(world)
    await fail(world, 4)
    await fail(world, 1, refusal)
    await fail(world, 4)

    assert is_closed(world)
    await fail(world, 1)
    assert not is_closed(world)


async def test_an_answer_that_makes_no_sense_never_counts_as_a_failure(world: World) -> None:
    world.fake.answer = infer_response(output0=np.ones((2, 6), np.float32))
    world.fake.answer.raw_output_contents[0] = b""
    for failures in (0, 4, 4):
        await fail(world, failures)
        for _ in range(10):
            with pytest.raises(InvalidModelOutput):
                await world.infer()

    assert is_closed(world)


async def test_an_answer_that_is_no_message_is_an_invalid_output() -> None:
    fake = FakeTriton()
    async with serving_bytes(b"\xff\xff\xff") as fake.url, open_world(fake) as world:
        for _ in range(10):
            with pytest.raises(InvalidModelOutput, match="cannot be read") as caught:
                await world.infer()
            assert caught.value.status == 502

        assert is_closed(world)


async def test_a_request_that_succeeds_at_second_try_is_no_failure(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    delaying(monkeypatch, 0)
    for _ in range(2):
        await fail(world, 4, (grpc.StatusCode.CANCELLED, ""))  # which is not tried again
        world.fake.next_refusals = [BROKEN]
        await world.infer()

    assert is_closed(world)


@pytest.fixture
async def five_hang(world: World) -> World:
    """Five inferences without an answer, whose requests have left."""
    world.hold()
    await world.give_up(5)
    assert is_closed(world)
    return world


async def test_inferences_that_hang_open_the_circuit(five_hang: World) -> None:
    await five_hang.time.skip(HANG_SECONDS)
    assert not is_closed(five_hang)
    assert five_hang.fake.cancelled == 0
    five_hang.let_answer()

    await eventually(lambda: is_closed(five_hang))


async def test_a_hang_that_fills_the_limit_opens_the_circuit(world: World) -> None:
    """Fewer requests than a circuit needs failures: no more would be admitted."""
    await world.infer()
    world.queue.limit = 2.0
    world.hold()
    await world.give_up(2)
    assert is_closed(world)
    await world.time.skip(HANG_SECONDS)

    assert not is_closed(world)


async def fall_silent(world: World, images: int, seconds: float = 20) -> list[asyncio.Task[Any]]:
    """Stop all answers of Triton while inferences are under way; return once Triton was asked whether it answers."""
    world.hold()
    world.fake.may_tell.clear()
    asked = world.fake.server_reads
    asking = await world.start(images, seconds)
    await world.time.skip(1)
    await eventually(lambda: world.fake.server_reads > asked)
    return asking


@SHARED_OR_NOT
@pytest.mark.parametrize("version", ["2.51.0", "2.59.1"])
async def test_deadlines_missed_while_triton_answers_nothing_open_the_circuit(
    world: World,
    version: str,
    is_shared: bool,  # noqa: FBT001
) -> None:
    await world.set_version(version)
    await world.infer()
    assert is_shared is (world.slot is not None)
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


async def test_a_question_without_an_answer_opens_the_circuit(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    await world.until_known()
    monkeypatch.setattr(client_module, "_QUERY_SECONDS", 0.1)
    other = msgspec.structs.replace(SPEC, name="other")
    await world.infer(spec=other)
    asking = await fall_silent(world, 1, 1000)
    await eventually(lambda: not is_closed(world))
    assert is_closed(world, "other")
    world.let_answer()

    await asyncio.gather(*asking)
    await eventually(lambda: is_closed(world))


async def test_a_lost_inference_gives_everything_back_at_last(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
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


async def test_inferences_that_are_answered_late_do_not_hang(five_hang: World) -> None:
    await five_hang.settle()
    await five_hang.time.skip(HANG_SECONDS)

    assert is_closed(five_hang)


async def test_an_inference_that_fails_late_counts_once(world: World) -> None:
    world.hold()
    world.fake.refusal = SICK
    await world.give_up(4)
    await world.settle()
    await world.time.skip(HANG_SECONDS)
    assert is_closed(world)

    await fail(world, 1)
    assert not is_closed(world)


async def test_a_caller_who_leaves_does_not_hide_a_hang(world: World) -> None:
    world.hold()
    await world.leave(await world.start(5))
    assert is_closed(world)
    await world.time.skip(HANG_SECONDS)

    assert not is_closed(world)


@pytest.mark.parametrize(("model", "is_busy"), [("tiny", True), ("other", False)])
async def test_a_busy_triton_does_not_hang(world: World, model: str, is_busy: bool) -> None:  # noqa: FBT001
    world.hold()
    world.fake.held = {"hang", "probe"}
    await world.give_up(5, request_id="hang")
    await world.infer(spec=msgspec.structs.replace(SPEC, name=model))
    await world.time.skip(HANG_SECONDS)

    assert is_closed(world) is is_busy


async def test_an_answer_before_an_inference_says_nothing_about_its_hang(world: World) -> None:
    await world.infer()
    world.hold()
    await world.give_up(5)
    await world.time.skip(HANG_SECONDS)

    assert not is_closed(world)


@pytest.mark.parametrize(("part", "opens"), [(0.7, True), (0.3, False), pytest.param(0.3, True, marks=SHARED)])
async def test_an_inference_that_is_cancelled_counts_if_it_was_given_time(world: World, part: float, opens: bool) -> None:  # noqa: FBT001
    """After half of the time of a hang, a cancelled inference counts as a failure. An inference with a slot is not cancelled."""
    await world.set_version("2.59.1")
    world.hold()
    await world.give_up(5, part * HANG_SECONDS)
    await world.round_trip()
    await world.time.skip(HANG_SECONDS)

    assert is_closed(world) is not opens
    await eventually(lambda: world.fake.cancelled == (5 if world.slot is None else 0))


def probing() -> bool:
    return any("CircuitBreaker" in repr(task) for task in asyncio.all_tasks())


async def test_no_probe_runs_after_the_end(five_hang: World) -> None:
    ending = asyncio.ensure_future(five_hang.batchers.close(2 * HANG_SECONDS))
    await five_hang.time.skip(HANG_SECONDS)
    assert not is_closed(five_hang)
    assert probing()
    await five_hang.time.skip(2 * HANG_SECONDS)
    await ending

    assert not is_closed(five_hang)
    assert not probing()


@SHARED
async def test_the_end_of_an_unanswered_call_is_no_answer(world: World) -> None:
    ended = grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
    with await world.admit():
        before = world.queue.limit
    for _ in range(4):
        world.hold()
        await world.give_up()
        assert world.slot
        arena = world.slot.arena
        world.fake.next_refusals = [ended]
        await world.settle()
        await eventually(lambda arena=arena: not (SHM / arena.name).exists())  # type: ignore[misc]
    assert is_closed(world)
    assert world.queue.limit == before
    world.fake.next_refusals = [ended]
    with pytest.raises(DeadlinePassed):
        await world.infer()

    assert not is_closed(world)
    assert {request.id for request in world.fake.requests} <= {"id", "probe"}


async def test_the_end_does_not_wait_for_inferences_that_hang(five_hang: World) -> None:
    """They may never end while the circuit of their model is open. Probing ends."""
    await five_hang.time.skip(HANG_SECONDS)
    assert not is_closed(five_hang)
    await five_hang.batchers.close(3600)
    asked = len(five_hang.fake.requests)
    assert not probing()
    await five_hang.time.skip(10)
    await five_hang.round_trip()

    assert len(five_hang.fake.requests) == asked


@pytest.mark.system
async def test_a_slot_is_free_only_when_its_rpc_to_a_real_triton_has_ended(
    own_triton: tuple[Settings, EmbeddedTriton], arenas: list[Arena]
) -> None:
    settings, server = own_triton
    hasty = msgspec.structs.replace(settings, timeout_seconds=0.5, transport="shm")
    process = psutil.Process(server.pid)
    async with started(create_app(hasty)) as client:
        assert await finds(client)
        (arena,) = arenas
        process.send_signal(signal.SIGSTOP)
        try:
            await eventually(lambda: process.status() == psutil.STATUS_STOPPED)
            assert json(await client.post("/predict/six_columns", content=SCENE), 504)["code"] == "deadline_passed"
            assert arena.lent_bytes
        finally:
            process.send_signal(signal.SIGCONT)

        await eventually(lambda: not arena.lent_bytes)
