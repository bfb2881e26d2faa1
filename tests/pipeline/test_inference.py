"""Inferences, also those that nobody waits for any more: what Triton still reads stays until their RPC has ended."""

import asyncio
import gc
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import numpy as np
import psutil
import pytest

from app.config import Settings
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
from app.pipeline.buffer import InputBuffer
from app.pipeline.call import CallContext
from app.pipeline.inference import InferenceRunner
from app.pipeline.triton_calls import TritonCalls
from app.resilience.deadline import Deadline
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.worker_table import WorkerTable
from app.telemetry.timing import Timing
from app.telemetry.trace_context import TraceContext
from app.triton import client as client_module
from app.triton.client import TritonClient
from app.triton.messages import InferResult
from app.triton.server_info import ServerInfo
from app.triton.shared_memory import SHM, Arena, Slot
from app.triton.status import Disconnected, Draining, ModelDied, Overloaded, Unreachable
from app.triton.transport import Transport
from tests.fakes.triton import SPEC, FakeTriton, infer_response, serving, serving_bytes
from tests.support import AGGREGATION, METRICS, SCENE, eventually, finds, json, pool_of, started

TRACE = TraceContext("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331", 1)
IMAGE = np.arange(SPEC.image_bytes, dtype=np.uint32).astype(np.uint8).reshape(SPEC.image_shape)


class Setup:
    """Inferences on a fake Triton, with everything they need."""

    def __init__(self, fake: FakeTriton, client: TritonClient) -> None:
        self.fake = fake
        self.client = client
        self.shared = Transport("auto")
        self.pool = pool_of(client, self.shared)
        self.specs = self.pool.servers[0].specs
        self.regions = self.pool.servers[0].regions
        self.inline = Transport("inline")
        self.inferences = InferenceRunner(TritonCalls(self.pool, METRICS, AGGREGATION.max_calls, hang_seconds=0.4))
        self.table = WorkerTable()
        self.queue = ModelQueue(self.table, "tiny", 1000, target_seconds=1e6)
        self.slot: Slot | None = None
        """Of the last inference."""

    async def infer(
        self,
        seconds: float = 30,
        *,
        is_shared: bool = False,
        request_id: str = "id",
        trace: TraceContext | None = None,
        spec: ModelSpec = SPEC,
    ) -> InferResult:
        """Run one inference as a request does."""
        call = CallContext(Deadline.after(seconds), Timing(), request_id, trace=trace)
        with await self.admit() as permit:
            buffer = InputBuffer(self.shared if is_shared else self.inline, permit)
            buffer.allocate(SPEC.image_shape, np.uint8, SPEC.image_bytes)[:] = IMAGE
            self.slot = buffer.slot
            assert (self.slot is not None) is is_shared
            return await self.inferences.run(spec, buffer, call, permit)

    async def admit(self) -> Permit:
        """Admit a request."""
        return await self.queue.admit("", 1.0, Deadline.after(60))

    def is_slot_free(self) -> bool:
        """Return whether the slot of the last inference has been given back."""
        assert self.slot is not None
        return not self.slot.arena.lent_bytes


@asynccontextmanager
async def inferring(fake: FakeTriton) -> AsyncIterator[Setup]:
    """Connect to a fake, and end everything afterwards."""
    client = TritonClient(fake.url)
    made = Setup(fake, client)
    await made.shared.prepare(SPEC.image_bytes)
    try:
        yield made
    finally:
        fake.may_answer.set()
        await made.inferences.close(10)
        await made.shared.close()
        await client.close()
        made.table.close()


@pytest.fixture
async def setup(fake_triton: tuple[FakeTriton, TritonClient]) -> AsyncIterator[Setup]:
    async with inferring(fake_triton[0]) as made:
        yield made


@pytest.fixture
async def unretrieved() -> AsyncIterator[list[dict[str, Any]]]:
    """What the event loop reports of failures that nobody has looked at."""
    loop = asyncio.get_running_loop()
    reports: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda _, context: reports.append(context))
    yield reports
    loop.set_exception_handler(None)


@pytest.mark.parametrize("is_shared", [True, False])
async def test_an_inference_is_asked_once_and_answered(setup: Setup, is_shared: bool) -> None:  # noqa: FBT001
    """Through a slot or inline, with the id of the request and the time that is left."""
    setup.fake.answer = infer_response(output0=np.ones((2, 6), np.float32))
    answer = await setup.infer(1.5, is_shared=is_shared, request_id="abc")

    assert answer.outputs["output0"].sum() == 12
    (request,) = setup.fake.requests
    assert request.id == "abc"
    assert request.parameters["timeout"].int64_param == pytest.approx(1_500_000, abs=100_000)
    assert ("shared_memory_region" in request.inputs[0].parameters) is is_shared
    assert list(request.raw_input_contents) == ([] if is_shared else [IMAGE.tobytes()])


async def test_triton_is_told_whose_call_it_is(setup: Setup) -> None:
    """Each attempt carries the caller's span; without one, Triton is told nothing."""
    setup.fake.answer = infer_response(output0=np.ones((2, 6), np.float32))
    setup.fake.next_refusals = [STOPPING]
    await setup.infer(trace=TRACE)
    await setup.infer()

    assert [metadata.get("traceparent") for metadata in setup.fake.metadata] == [TRACE.traceparent, TRACE.traceparent, None]


async def test_a_slot_is_free_after_its_inference(setup: Setup) -> None:
    """Triton does not read it any more."""
    await setup.infer(is_shared=True)

    assert setup.is_slot_free()


async def test_an_inference_that_is_late_is_not_waited_for(setup: Setup) -> None:
    """The caller gets an error at its deadline, whatever Triton does."""
    setup.fake.may_answer.clear()

    with pytest.raises(DeadlinePassed, match="did not answer in time"):
        await setup.infer(0.1)


async def test_no_time_left_is_no_answer(setup: Setup) -> None:
    """A request whose deadline has passed is not sent to Triton."""
    for seconds in (0, -5):
        with pytest.raises(DeadlinePassed):
            await setup.infer(seconds, is_shared=True)
        assert setup.is_slot_free()

    await setup.infer()
    assert len(setup.fake.requests) == 1


@pytest.mark.parametrize(
    ("version", "is_shared", "cancelled"), [("2.51.0", False, 0), ("2.51.0", True, 0), ("2.59.1", False, 2), ("2.59.1", True, 1)]
)
async def test_an_inference_is_cancelled_only_if_that_is_safe(
    fake_triton: tuple[FakeTriton, TritonClient],
    version: str,
    is_shared: bool,  # noqa: FBT001
    cancelled: int,
) -> None:
    """Triton survives it and reads no slot; else the RPC goes on, and keeps the slot until it has ended."""
    fake, _ = fake_triton
    fake.version = version
    async with inferring(fake) as setup:
        assert await eventually(lambda: setup.client.server == ServerInfo(version))
        fake.may_answer.clear()
        leaving = asyncio.ensure_future(setup.infer(30))
        assert await eventually(lambda: len(fake.requests) == 1)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        with pytest.raises(DeadlinePassed):
            await setup.infer(0.1, is_shared=is_shared)
        assert await eventually(lambda: fake.cancelled == cancelled)
        await asyncio.sleep(0.1)
        assert not (is_shared and setup.is_slot_free())
        fake.may_answer.set()
        await setup.inferences.close(10)
        await asyncio.sleep(0)

        assert not is_shared or setup.is_slot_free()
        assert fake.cancelled == cancelled


async def test_nothing_is_cancelled_while_the_version_is_unknown(setup: Setup) -> None:
    """An unknown Triton may be an old one."""
    setup.client.server = None
    setup.fake.may_answer.clear()
    with pytest.raises(DeadlinePassed):
        await setup.infer(0.1)
    await asyncio.sleep(0.1)

    assert setup.fake.cancelled == 0
    setup.fake.may_answer.set()
    await setup.inferences.close(10)


@pytest.mark.parametrize("how", ["deadline", "cancel"])
async def test_a_slot_stays_with_its_rpc(setup: Setup, how: str) -> None:
    """Triton reads it until the RPC ends: another image must not take its place before."""
    setup.fake.may_answer.clear()
    asking = asyncio.ensure_future(setup.infer(0.2 if how == "deadline" else 30, is_shared=True))
    assert await eventually(lambda: bool(setup.fake.requests))
    if how == "cancel":
        asking.cancel()
    with pytest.raises((DeadlinePassed, asyncio.CancelledError)):
        await asking
    assert not setup.is_slot_free()
    setup.fake.may_answer.set()

    assert await eventually(setup.is_slot_free)
    assert setup.slot is not None
    assert setup.is_slot_free()


async def test_draining_waits_for_abandoned_inferences(setup: Setup) -> None:
    """Their slots are read until then; afterwards none is left."""
    setup.fake.may_answer.clear()
    with pytest.raises(DeadlinePassed):
        await setup.infer(0.1, is_shared=True)
    draining = asyncio.ensure_future(setup.inferences.close(10))
    await asyncio.sleep(0.2)
    assert not draining.done()
    assert not setup.is_slot_free()
    setup.fake.may_answer.set()
    await draining
    await asyncio.sleep(0)

    assert setup.is_slot_free()


async def test_draining_nothing_returns_at_once(setup: Setup) -> None:
    """Nothing was abandoned, so there is nothing to wait for."""
    await setup.infer()
    await setup.inferences.close(10)


async def test_an_abandoned_inference_that_fails_is_not_reported(setup: Setup, unretrieved: list[dict[str, Any]]) -> None:
    """Triton drops it from its queue at its deadline; its caller has had an answer by then."""
    setup.fake.may_answer.clear()
    setup.fake.refusal = grpc.StatusCode.UNAVAILABLE, "Request timeout expired"
    with pytest.raises(DeadlinePassed):
        await setup.infer(0.1)
    setup.fake.may_answer.set()
    await setup.inferences.close(10)
    await asyncio.sleep(0)
    gc.collect()

    assert [report["message"] for report in unretrieved] == []


@pytest.mark.parametrize("refusal", [None, (grpc.StatusCode.UNAVAILABLE, "Request timeout expired")])
async def test_a_late_answer_is_measured(setup: Setup, refusal: tuple[grpc.StatusCode, str] | None) -> None:
    """Also that of an inference that Triton dropped at its deadline; the limit would else stay above what the model can do."""
    setup.fake.may_answer.clear()
    setup.fake.refusal = refusal
    before = setup.queue.limit
    with pytest.raises(DeadlinePassed):
        await setup.infer(0.1, is_shared=True)
    assert setup.queue.limit == before
    setup.fake.may_answer.set()
    await setup.inferences.close(10)
    await asyncio.sleep(0)

    assert setup.queue.limit > before  # the target is a million seconds


async def test_an_answer_in_time_is_measured_once(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """From admission to the answer."""
    measured: list[float] = []
    monkeypatch.setattr(setup.queue, "measure", lambda seconds, *_, **__: measured.append(seconds))
    await setup.infer()
    await asyncio.sleep(0)

    assert len(measured) == 1


async def test_a_failed_inference_is_not_measured(setup: Setup) -> None:
    """How fast Triton rejects a request says nothing about the model."""
    before = setup.queue.limit
    setup.fake.refusal = grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"
    with pytest.raises(TritonUnavailable):
        await setup.infer()
    await asyncio.sleep(0)

    assert setup.queue.limit == before


@pytest.mark.parametrize("accepts_regions", [True, False])
async def test_a_forgotten_region_is_registered_again_or_done_without(setup: Setup, accepts_regions: bool) -> None:  # noqa: FBT001
    """Triton was restarted; the same request gets its answer either way."""
    setup.fake.regions.clear()
    setup.fake.accepts_regions = accepts_regions
    assert await setup.infer(is_shared=True)

    first, second = setup.fake.requests
    assert "shared_memory_region" in first.inputs[0].parameters
    assert ("shared_memory_region" in second.inputs[0].parameters) is accepts_regions
    assert list(second.raw_input_contents) == ([] if accepts_regions else [IMAGE.tobytes()])
    assert setup.shared.active_mode == ("shm" if accepts_regions else "inline")
    assert setup.is_slot_free()


async def test_a_late_answer_about_a_forgotten_region_starts_nothing(setup: Setup) -> None:
    """Once the deadline has passed, the region is not registered again for this request, and no second inference is started."""
    registrations = len(setup.fake.registrations)
    setup.fake.regions.clear()
    setup.fake.may_answer.clear()
    with pytest.raises(DeadlinePassed):
        await setup.infer(0.1, is_shared=True)
    setup.fake.may_answer.set()
    await setup.inferences.close(10)

    assert len(setup.fake.requests) == 1
    assert len(setup.fake.registrations) == registrations
    assert await eventually(setup.is_slot_free)


async def test_a_slow_registration_starts_no_second_inference(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline may also pass while the region is registered again; the region is then ready for the next request."""
    add_again = setup.regions.add_again

    async def register_slowly(arena: Arena) -> bool:
        await asyncio.sleep(0.3)
        return await add_again(arena)

    monkeypatch.setattr(setup.regions, "add_again", register_slowly)
    setup.fake.regions.clear()
    with pytest.raises(DeadlinePassed):
        await setup.infer(0.1, is_shared=True)
    await setup.inferences.close(10)

    assert len(setup.fake.requests) == 1
    assert len(setup.fake.regions) == 1
    assert await eventually(setup.is_slot_free)


async def test_many_inferences_register_a_forgotten_region_together(setup: Setup) -> None:
    """All of them get their answers, and the region is registered once."""
    setup.fake.regions.clear()
    answers = await asyncio.gather(*(setup.infer(is_shared=True) for _ in range(8)))

    assert len(answers) == 8
    assert setup.shared.active_mode == "shm"
    assert len(setup.fake.regions) == 1


async def test_after_the_refusal_of_one_registration_others_do_without(setup: Setup) -> None:
    """Of two requests with slots in a forgotten region, one was refused to register it again; the other travels inline."""
    setup.fake.accepts_regions = False
    with await setup.admit() as permit:
        buffer = InputBuffer(setup.shared, permit)
        buffer.allocate(SPEC.image_shape, np.uint8, SPEC.image_bytes)
        assert buffer.slot is not None
        assert not await setup.regions.add_again(buffer.slot.arena)
        assert await setup.inferences.run(SPEC, buffer, CallContext(Deadline.after(5), Timing(), "id"), permit)

    assert len(setup.fake.requests) == 1
    assert "shared_memory_region" not in setup.fake.requests[0].inputs[0].parameters


class ForgetfulSet(set[str]):
    """Never contains what was added to it."""

    def add(self, _: str) -> None:
        """Forget it."""


async def test_a_region_that_is_forgotten_twice_is_an_unavailable_triton(setup: Setup) -> None:
    """This happens with two Tritons behind one address; the caller may retry, and the model is not missing."""
    setup.fake.regions = ForgetfulSet()
    with pytest.raises(TritonUnavailable):
        await setup.infer(is_shared=True)

    assert len(setup.fake.requests) == 2
    assert setup.is_slot_free()


async def test_a_triton_that_dies_while_a_region_is_registered_again_is_unavailable(setup: Setup) -> None:
    """The request fails, the arena stays in use for those after it."""
    setup.fake.regions.clear()
    setup.fake.refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"
    with pytest.raises(TritonUnavailable):
        await setup.infer(is_shared=True)

    assert setup.is_slot_free()
    assert setup.shared.active_mode == "shm"


@pytest.mark.parametrize(
    ("refusal", "expected", "is_kept"),
    [
        ((grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"), TritonUnavailable, True),
        ((grpc.StatusCode.UNAVAILABLE, "Request timeout expired"), DeadlinePassed, True),
        ((grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input"), InferenceFailed, False),
        ((grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions"), ModelNotReady, False),
        ((grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"), ModelNotReady, False),
    ],
)
async def test_a_failed_inference_lets_the_spec_be_read_again(
    setup: Setup,
    refusal: tuple[grpc.StatusCode, str],
    expected: type[GatewayError],
    is_kept: bool,  # noqa: FBT001
) -> None:
    """The model may have changed; a full queue is no reason to think so."""
    await setup.specs.get("tiny")
    setup.fake.refusal = refusal
    with pytest.raises(expected):
        await setup.infer()

    assert (setup.specs.cached("tiny") is not None) is is_kept
    await setup.specs.get("tiny")
    assert setup.fake.config_reads == (1 if is_kept else 2)


async def test_an_inconsistent_response_keeps_the_spec(setup: Setup) -> None:
    """A model that contradicts its own config does so again: ten such requests read the config once."""
    setup.fake.answer = infer_response(output0=np.ones((2, 6), np.float32))
    setup.fake.answer.raw_output_contents[0] = b""
    for _ in range(10):
        await setup.specs.get("tiny")
        with pytest.raises(InvalidModelOutput):
            await setup.infer()

    assert len(setup.fake.requests) == 10
    assert setup.fake.config_reads == 1


STOPPING = grpc.StatusCode.UNAVAILABLE, "Server is stopping, scheduler for model has stopped accepting new inference requests"
REFUSED = grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused"
BROKEN = grpc.StatusCode.UNAVAILABLE, "Socket closed"


class Pixels(np.ndarray[Any, Any]):
    """An array whose instances can be counted."""


@pytest.mark.parametrize("refusal", [(grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input"), BROKEN])
async def test_a_failed_inference_leaves_no_reference_cycle(setup: Setup, refusal: tuple[grpc.StatusCode, str]) -> None:
    """Its image is freed at once, not when the garbage collector runs; also if it was tried again, or could not be."""
    setup.fake.refusal = refusal
    gc.collect()
    gc.disable()
    try:
        for _ in range(8):  # more than the retries that are saved up
            with suppress(InferenceFailed, TritonUnavailable), await setup.admit() as permit:
                buffer = InputBuffer(setup.inline, permit)
                buffer.tensor = IMAGE.copy().view(Pixels)
                await setup.inferences.run(SPEC, buffer, CallContext(Deadline.after(5), Timing(), "id"), permit)
        alive = [thing for thing in gc.get_objects() if isinstance(thing, Pixels)]
    finally:
        gc.enable()

    assert len(alive) <= 1  # of the buffer that is still a name here


SICK = grpc.StatusCode.INTERNAL, "Stub process 'tiny_0_0' is not healthy."
LOST = ((STOPPING, Draining), (REFUSED, Unreachable), (BROKEN, Disconnected))
"""Refusals after which a request is tried again."""
ANSWERS: tuple[tuple[tuple[grpc.StatusCode, str], type[GatewayError]], ...] = (
    ((grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"), Overloaded),
    ((grpc.StatusCode.RESOURCE_EXHAUSTED, "not enough memory"), Overloaded),
    ((grpc.StatusCode.INTERNAL, "Failed to increase the shared memory pool size"), Overloaded),
    ((grpc.StatusCode.UNAVAILABLE, "Request timeout expired"), DeadlinePassed),
    ((grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input"), InferenceFailed),
    ((grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions"), ModelNotReady),
    ((grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"), ModelNotReady),
)
"""Refusals by a Triton that works."""


def has_slot(request: Any) -> bool:  # noqa: ANN401
    """Return whether a request refers to shared memory."""
    return "shared_memory_region" in request.inputs[0].parameters


def delaying(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let a request wait so long before it is tried again."""
    monkeypatch.setattr(triton_calls, "random", SimpleNamespace(uniform=lambda *_: seconds))


@pytest.mark.parametrize("is_shared", [True, False])
@pytest.mark.parametrize("refusal", [STOPPING, REFUSED, BROKEN])
async def test_a_request_that_was_lost_is_tried_once_more(
    setup: Setup,
    refusal: tuple[grpc.StatusCode, str],
    is_shared: bool,  # noqa: FBT001
) -> None:
    """Inline, because what Triton has mapped, and what it still reads, is not known then."""
    setup.fake.answer = infer_response(output0=np.ones((2, 6), np.float32))
    setup.fake.next_refusals = [refusal]
    answer = await setup.infer(is_shared=is_shared)

    assert answer.outputs["output0"].sum() == 12
    first, second = setup.fake.requests
    assert has_slot(first) is is_shared
    assert not has_slot(second)
    assert list(second.raw_input_contents) == [IMAGE.tobytes()]
    assert first.id == second.id == "id"


@pytest.mark.parametrize(("second", "expected"), [*LOST, *ANSWERS, (SICK, ModelDied)])
async def test_no_request_is_tried_more_than_twice(
    setup: Setup, second: tuple[grpc.StatusCode, str], expected: type[GatewayError]
) -> None:
    """The second answer is final, whatever it is."""
    for first in (STOPPING, BROKEN):
        setup.fake.requests.clear()
        setup.fake.next_refusals = [first, second]
        with pytest.raises(expected) as caught:
            await setup.infer()
        assert type(caught.value) is expected
        assert len(setup.fake.requests) == 2


async def test_a_forgotten_region_is_the_only_reason_to_try_again(setup: Setup) -> None:
    """A request that was lost after that has been tried twice."""
    setup.fake.regions.clear()
    setup.fake.next_refusals = [None, STOPPING]
    with pytest.raises(Draining):
        await setup.infer(is_shared=True)

    assert len(setup.fake.requests) == 2


@pytest.mark.parametrize(("refusal", "expected"), [*ANSWERS, (SICK, ModelDied)])
async def test_an_answer_is_no_reason_to_try_again(
    setup: Setup, refusal: tuple[grpc.StatusCode, str], expected: type[GatewayError]
) -> None:
    """Least of all that of a Triton that has too much to do; nor is a process that has died back at once."""
    setup.fake.next_refusals = [refusal]
    with pytest.raises(expected) as caught:
        await setup.infer(is_shared=True)

    assert type(caught.value) is expected
    assert len(setup.fake.requests) == 1
    assert setup.is_slot_free()


async def test_few_requests_are_tried_again(setup: Setup) -> None:
    """If all are lost, three of them are at first; requests that are answered earn more."""
    attempts = []
    setup.fake.refusal = STOPPING
    for _ in range(5):
        setup.fake.requests.clear()
        with pytest.raises(Draining):
            await setup.infer()
        attempts.append(len([request for request in setup.fake.requests if request.id == "id"]))

    assert attempts == [2, 2, 2, 1, 1]
    setup.fake.refusal = None
    for _ in range(10):
        await setup.infer()
    setup.fake.next_refusals = [STOPPING]
    assert await setup.infer()


async def test_a_request_is_not_tried_again_shortly_before_its_deadline(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """It hears why it failed, and takes none of the retries of others."""
    setup.fake.next_refusals = [STOPPING] * 5
    delaying(monkeypatch, 3)
    for _ in range(5):
        with pytest.raises(Draining):
            await setup.infer(2)
    assert len(setup.fake.requests) == 5
    delaying(monkeypatch, 0)
    for _ in range(3):
        setup.fake.next_refusals = [STOPPING]
        await setup.infer(2)

    assert len(setup.fake.requests) == 11


async def test_an_inference_that_nobody_waits_for_is_not_tried_again(setup: Setup) -> None:
    """Triton has more to do."""
    setup.fake.may_answer.clear()
    setup.fake.next_refusals = [BROKEN]
    asking = asyncio.ensure_future(setup.infer(is_shared=True))
    assert await eventually(lambda: len(setup.fake.requests) == 1)
    asking.cancel()
    await asyncio.wait([asking])
    setup.fake.may_answer.set()
    await setup.inferences.close(10)

    assert len(setup.fake.requests) == 1


@pytest.mark.parametrize("is_shared", [True, False])
async def test_a_triton_that_is_started_in_time_answers(monkeypatch: pytest.MonkeyPatch, is_shared: bool) -> None:  # noqa: FBT001
    """Of a real server that is stopped during the inference, or before it, the caller notices nothing."""
    delaying(monkeypatch, 1)
    fake = FakeTriton()
    async with AsyncExitStack() as stack:
        async with serving(fake) as port:
            setup = await stack.enter_async_context(inferring(fake))
            fake.may_answer.clear()
            asking = asyncio.ensure_future(setup.infer(is_shared=is_shared))
            assert await eventually(lambda: len(fake.requests) == 1)
        assert await eventually(lambda: fake.cancelled == 1)
        fake.may_answer.set()
        late = asyncio.ensure_future(setup.infer())
        await asyncio.sleep(0.1)
        async with serving(fake, port):
            assert (await asking).version == (await late).version == "1"
            assert [has_slot(request) for request in fake.requests] == [is_shared, False, False]
            assert setup.pool.is_usable("tiny")
            await stack.aclose()


async def test_slots_of_a_broken_connection_are_not_used_again(setup: Setup) -> None:
    """Triton may still read them; the arena is removed, and the next request gets a new one."""
    setup.fake.may_answer.clear()
    setup.fake.next_refusals = [BROKEN]
    asking = [asyncio.ensure_future(setup.infer(is_shared=True)) for _ in range(8)]
    assert await eventually(lambda: len(setup.fake.requests) == 8)
    assert setup.slot is not None
    arena = setup.slot.arena
    setup.fake.may_answer.set()
    await asyncio.gather(*asking)

    assert len(setup.fake.requests) == 9
    assert setup.shared.take(SPEC.image_bytes, SPEC.image_bytes) is None
    assert await eventually(lambda: arena.region not in setup.fake.regions and not (SHM / arena.name).exists())
    await setup.shared.prepare(SPEC.image_bytes)
    await setup.infer(is_shared=True)
    assert setup.slot.arena is not arena
    assert has_slot(setup.fake.requests[-1])


@pytest.mark.parametrize("refusal", [STOPPING, REFUSED, SICK])
async def test_slots_that_triton_does_not_read_stay_in_use(setup: Setup, refusal: tuple[grpc.StatusCode, str]) -> None:
    """It has not seen the request, or has ended it."""
    setup.fake.next_refusals = [refusal]
    with suppress(TritonUnavailable):
        await setup.infer(is_shared=True)
    assert setup.slot is not None
    arena = setup.slot.arena
    await setup.infer(is_shared=True)

    assert setup.slot.arena is arena


async def fail(setup: Setup, times: int, refusal: tuple[grpc.StatusCode, str] = SICK, spec: ModelSpec = SPEC) -> None:
    """Let inferences fail, one after the other."""
    for _ in range(times):
        before, setup.fake.refusal = setup.fake.refusal, refusal
        with pytest.raises(GatewayError):
            await setup.infer(spec=spec)
        setup.fake.refusal = before


def is_closed(setup: Setup, model: str = "tiny") -> bool:
    return setup.pool.is_usable(model)


@pytest.mark.parametrize(
    "refusal", [STOPPING, REFUSED, BROKEN, SICK, (grpc.StatusCode.CANCELLED, ""), (grpc.StatusCode.UNAVAILABLE, "GOAWAY received")]
)
async def test_failures_open_the_circuit_of_their_model(setup: Setup, refusal: tuple[grpc.StatusCode, str]) -> None:
    """Five of them; only that of this one."""
    await fail(setup, 4, refusal)
    assert is_closed(setup)
    await fail(setup, 1, refusal)

    assert not is_closed(setup)
    assert is_closed(setup, "other")


async def test_each_model_has_its_own_circuit(setup: Setup) -> None:
    """And is probed by itself."""
    other = msgspec.structs.replace(SPEC, name="other")
    setup.fake.refusal = SICK
    await fail(setup, 5)
    await fail(setup, 4, spec=other)
    assert [is_closed(setup, model) for model in ("tiny", "other")] == [False, True]
    await fail(setup, 1, spec=other)
    assert [is_closed(setup, model) for model in ("tiny", "other")] == [False, False]
    setup.fake.requests.clear()
    setup.fake.refusal = None

    assert await eventually(lambda: is_closed(setup) and is_closed(setup, "other"))
    assert {request.model_name for request in setup.fake.requests} == {"tiny", "other"}


async def test_an_answer_to_the_probe_closes_the_circuit(setup: Setup) -> None:
    """Without any request of a caller."""
    setup.fake.refusal = SICK
    await fail(setup, 5)
    assert not is_closed(setup)
    asked = len(setup.fake.requests)
    assert await eventually(lambda: len(setup.fake.requests) > asked + 1)
    assert not is_closed(setup)
    setup.fake.refusal = None

    assert await eventually(lambda: is_closed(setup))
    assert {request.id for request in setup.fake.requests[asked:]} == {"probe"}
    assert not any(map(has_slot, setup.fake.requests[asked:]))


@pytest.mark.parametrize("refusal", [refusal for refusal, _ in ANSWERS])
async def test_an_answer_never_counts_as_a_failure(setup: Setup, refusal: tuple[grpc.StatusCode, str]) -> None:
    """However many of them there are; it shows that Triton works."""
    await fail(setup, 30, refusal)
    assert is_closed(setup)
    await fail(setup, 4)
    await fail(setup, 1, refusal)
    await fail(setup, 4)

    assert is_closed(setup)
    await fail(setup, 1)
    assert not is_closed(setup)


async def test_an_answer_that_makes_no_sense_never_counts_as_a_failure(setup: Setup) -> None:
    """It is the model that fails, and not Triton."""
    setup.fake.answer = infer_response(output0=np.ones((2, 6), np.float32))
    setup.fake.answer.raw_output_contents[0] = b""
    for failures in (0, 4, 4):
        await fail(setup, failures)
        for _ in range(10):
            with pytest.raises(InvalidModelOutput):
                await setup.infer()

    assert is_closed(setup)


async def test_an_answer_that_is_no_message_is_an_invalid_output() -> None:
    """It is not tried again, does not count as a failure, and says nothing about the spec."""
    fake = FakeTriton()
    async with serving_bytes(b"\xff\xff\xff") as fake.url, inferring(fake) as setup:
        for _ in range(10):
            with pytest.raises(InvalidModelOutput, match="cannot be read") as caught:
                await setup.infer()
            assert caught.value.status == 502

        assert is_closed(setup)


async def test_a_request_that_succeeds_at_second_try_is_no_failure(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its caller has got an answer."""
    delaying(monkeypatch, 0)
    for _ in range(2):
        await fail(setup, 4)
        setup.fake.next_refusals = [BROKEN]
        await setup.infer()

    assert is_closed(setup)


@pytest.fixture
async def five_hang(setup: Setup) -> AsyncIterator[Setup]:
    """Five inferences have no answer, and nobody waits for them any more."""
    setup.fake.may_answer.clear()
    await give_up(setup)
    assert is_closed(setup)
    yield setup
    setup.fake.may_answer.set()


async def give_up(setup: Setup, seconds: float = 0.1, *, is_shared: bool = False, times: int = 5) -> None:
    """Start inferences, and wait for them until their deadline."""
    asking = [setup.infer(seconds, is_shared=is_shared) for _ in range(times)]
    assert [type(failed) for failed in await asyncio.gather(*asking, return_exceptions=True)] == [DeadlinePassed] * times


async def test_inferences_that_hang_open_the_circuit(five_hang: Setup) -> None:
    """Although their RPCs go on; as soon as Triton answers again, it is closed."""
    setup = five_hang
    assert await eventually(lambda: not is_closed(setup))
    assert setup.fake.cancelled == 0
    setup.fake.may_answer.set()

    assert await eventually(lambda: is_closed(setup))


async def test_inferences_that_are_answered_late_do_not_hang(five_hang: Setup) -> None:
    """Their callers had little time; Triton took less than counts as a failure."""
    five_hang.fake.may_answer.set()
    assert await eventually(lambda: five_hang.fake.running == 0)
    await asyncio.sleep(0.6)

    assert is_closed(five_hang)


async def test_an_inference_that_fails_late_counts_once(setup: Setup) -> None:
    """And not once more when it would have hung."""
    setup.fake.may_answer.clear()
    setup.fake.refusal = SICK
    await give_up(setup, times=4)
    setup.fake.may_answer.set()
    assert await eventually(lambda: setup.fake.running == 0)
    await asyncio.sleep(0.6)
    assert is_closed(setup)

    await fail(setup, 1)
    assert not is_closed(setup)


async def test_a_caller_who_leaves_does_not_hide_a_hang(setup: Setup) -> None:
    """It is noted as soon as there has been no answer for long, whoever waits."""
    setup.fake.may_answer.clear()
    asking = [asyncio.ensure_future(setup.infer(30)) for _ in range(5)]
    assert await eventually(lambda: setup.fake.running == 5)
    for one in asking:
        one.cancel()
    await asyncio.gather(*asking, return_exceptions=True)

    assert await eventually(lambda: not is_closed(setup))


class HangingTriton(FakeTriton):
    """Answers no probe, and no inference whose id is `hang`."""

    def __init__(self) -> None:
        super().__init__()
        self.may_end = asyncio.Event()

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        """Answer, if it must not hang."""
        if request.id in {"hang", "probe"}:
            await self.may_end.wait()
        return await super().ModelInfer(request, context)


@pytest.mark.parametrize(("model", "is_busy"), [("tiny", True), ("other", False)])
async def test_a_busy_triton_does_not_hang(model: str, is_busy: bool) -> None:  # noqa: FBT001
    """An inference may wait for long while others of its model are answered; those of other models do not count."""
    fake = HangingTriton()
    async with serving(fake), inferring(fake) as setup:
        hanging = [setup.infer(0.1, request_id="hang") for _ in range(5)]
        await asyncio.gather(*hanging, return_exceptions=True)
        await setup.infer(spec=msgspec.structs.replace(SPEC, name=model))
        await asyncio.sleep(0.6)
        closed = is_closed(setup)
        fake.may_end.set()

        assert closed is is_busy


async def test_an_answer_before_an_inference_says_nothing_about_its_hang(setup: Setup) -> None:
    """Triton worked then."""
    await setup.infer()
    setup.fake.may_answer.clear()
    await give_up(setup)

    assert await eventually(lambda: not is_closed(setup))


@pytest.mark.parametrize(("seconds", "is_shared", "opens"), [(0.3, False, True), (0.1, False, False), (0.1, True, True)])
async def test_an_inference_that_is_cancelled_counts_if_it_was_given_time(
    seconds: float,
    is_shared: bool,  # noqa: FBT001
    opens: bool,  # noqa: FBT001
) -> None:
    """Half of what counts as a hang is enough; what Triton would have done in the rest is not known. One with a slot goes on."""
    fake = FakeTriton()
    fake.version = "2.59.1"
    async with serving(fake), inferring(fake) as setup:
        assert await eventually(lambda: setup.client.survives_cancel)
        fake.may_answer.clear()
        await give_up(setup, seconds, is_shared=is_shared)
        await asyncio.sleep(0.6)

        assert is_closed(setup) is not opens
        assert fake.cancelled == (0 if is_shared else 5)


@pytest.mark.parametrize("refusal", [ANSWERS[1][0], ANSWERS[2][0]])
async def test_a_triton_without_memory_is_overloaded(setup: Setup, refusal: tuple[grpc.StatusCode, str]) -> None:
    """The caller is told to come back, which is no fault of the model."""
    setup.fake.refusal = refusal
    with pytest.raises(Overloaded, match="no memory left") as caught:
        await setup.infer()

    assert (caught.value.status, caught.value.code, caught.value.retry_after_seconds) == (503, "triton_unavailable", 1)


async def test_nothing_probes_after_the_end(setup: Setup) -> None:
    """Although the circuit opens only while the end waits for an inference."""
    setup.fake.may_answer.clear()
    await give_up(setup)
    assert is_closed(setup)
    await setup.inferences.close(1)

    assert not is_closed(setup)
    assert not [task for task in asyncio.all_tasks() if "CircuitBreaker" in repr(task)]


async def test_the_end_of_an_unanswered_call_is_no_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The gateway itself ends it, at a Triton that survives that: it counts as a failure, and its slot is not used again."""
    monkeypatch.setattr(client_module, "_BACKSTOP_SECONDS", 0.2)
    fake = FakeTriton()
    fake.version = "2.59.1"
    async with serving(fake), inferring(fake) as setup:
        assert await eventually(lambda: setup.client.survives_cancel)
        fake.may_answer.clear()
        before = setup.queue.limit
        for _ in range(4):
            await setup.shared.prepare(SPEC.image_bytes)
            await give_up(setup, 0.05, is_shared=True, times=1)
            assert setup.slot
            arena = setup.slot.arena
            assert await eventually(lambda arena=arena: not (SHM / arena.name).exists())  # type: ignore[misc]
        assert is_closed(setup)
        assert setup.queue.limit == before
        await setup.shared.prepare(SPEC.image_bytes)
        await give_up(setup, 0.05, is_shared=True, times=1)

        assert await eventually(lambda: not is_closed(setup))
        assert {request.id for request in fake.requests} <= {"id", "probe"}


async def test_the_end_does_not_wait_for_inferences_that_hang(five_hang: Setup) -> None:
    """While the circuit of their model is open, they may never end; nothing probes any more then."""
    assert await eventually(lambda: not is_closed(five_hang))
    await asyncio.wait_for(five_hang.inferences.close(3600), 30)
    asked = len(five_hang.fake.requests)
    assert not [task for task in asyncio.all_tasks() if "CircuitBreaker" in repr(task)]
    await asyncio.sleep(0.3)

    assert len(five_hang.fake.requests) == asked


async def test_a_slot_is_free_only_when_its_rpc_to_a_real_triton_has_ended(
    own_triton: tuple[Settings, EmbeddedTriton], arenas: list[Arena]
) -> None:
    """A request that gave up leaves its pixels where Triton may still read them."""
    settings, server = own_triton
    hasty = msgspec.structs.replace(settings, timeout_seconds=0.5, transport="shm")
    process = psutil.Process(server.pid)
    async with started(create_app(hasty)) as client:
        assert await finds(client)
        (arena,) = arenas
        process.send_signal(signal.SIGSTOP)
        try:
            assert await eventually(lambda: process.status() == psutil.STATUS_STOPPED)
            assert json(await client.post("/predict/six_columns", content=SCENE), 504)["code"] == "deadline_passed"
            assert arena.lent_bytes
        finally:
            process.send_signal(signal.SIGCONT)

        assert await eventually(lambda: not arena.lent_bytes)
