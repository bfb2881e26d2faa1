"""Inferences, also those that nobody waits for any more: what Triton still reads stays until their RPC has ended."""

import asyncio
import gc
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
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
    UnknownModel,
)
from app.main import create_app
from app.pipeline.buffer import InputBuffer
from app.pipeline.inference import InferenceRunner
from app.resilience.deadline import Deadline
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.worker_table import WorkerTable
from app.triton.client import ServerInfo, TritonClient
from app.triton.messages import InferResult
from app.triton.shared_memory import Arena, Slot
from app.triton.specs import SpecCache
from app.triton.transport import Transport
from tests.fakes.triton import SPEC, FakeTriton, infer_response
from tests.support import SCENE, eventually, finds, json, started

IMAGE = np.arange(SPEC.image_bytes, dtype=np.uint32).astype(np.uint8).reshape(SPEC.image_shape)


class Setup:
    """Inferences on a fake Triton, with everything they need."""

    def __init__(self, fake: FakeTriton, client: TritonClient) -> None:
        self.fake = fake
        self.client = client
        self.specs = SpecCache(client)
        self.shared = Transport(client, "auto")
        self.inline = Transport(client, "inline")
        self.inferences = InferenceRunner(client, self.shared, self.specs)
        self.table = WorkerTable()
        self.queue = ModelQueue(self.table, "tiny", 1000, target_seconds=1e6)
        self.slot: Slot | None = None
        """Of the last inference."""

    async def infer(self, seconds: float = 30, *, is_shared: bool = False, request_id: str = "id") -> InferResult:
        """Run one inference as a request does."""
        with await self.admit() as permit:
            buffer = InputBuffer(self.shared if is_shared else self.inline, permit)
            buffer.allocate(SPEC.image_shape, np.uint8, SPEC.image_bytes)[:] = IMAGE
            self.slot = buffer.slot
            assert (self.slot is not None) is is_shared
            return await self.inferences.run(SPEC, buffer, Deadline.after(seconds), request_id, permit)

    async def admit(self) -> Permit:
        """Admit a request."""
        return await self.queue.admit("", 1.0, Deadline.after(60))

    def is_slot_free(self) -> bool:
        """Return whether the slot of the last inference has been given back."""
        assert self.slot is not None
        return self.slot.offset in self.slot.arena.free_offsets


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
        await made.inferences.drain()
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
        await setup.inferences.drain()
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
    await setup.inferences.drain()


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
    assert setup.slot.arena.free_offsets.count(setup.slot.offset) == 1


async def test_draining_waits_for_abandoned_inferences(setup: Setup) -> None:
    """Their slots are read until then; afterwards none is left."""
    setup.fake.may_answer.clear()
    with pytest.raises(DeadlinePassed):
        await setup.infer(0.1, is_shared=True)
    draining = asyncio.ensure_future(setup.inferences.drain())
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
    await setup.inferences.drain()


async def test_an_abandoned_inference_that_fails_is_not_reported(setup: Setup, unretrieved: list[dict[str, Any]]) -> None:
    """Triton drops it from its queue at its deadline; its caller has had an answer by then."""
    setup.fake.may_answer.clear()
    setup.fake.refusal = grpc.StatusCode.UNAVAILABLE, "Request timeout expired"
    with pytest.raises(DeadlinePassed):
        await setup.infer(0.1)
    setup.fake.may_answer.set()
    await setup.inferences.drain()
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
    await setup.inferences.drain()
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
    await setup.inferences.drain()

    assert len(setup.fake.requests) == 1
    assert len(setup.fake.registrations) == registrations
    assert await eventually(setup.is_slot_free)


async def test_a_slow_registration_starts_no_second_inference(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    """The deadline may also pass while the region is registered again; the region is then ready for the next request."""
    register_again = setup.shared.register_again

    async def register_slowly(arena: Arena) -> bool:
        await asyncio.sleep(0.3)
        return await register_again(arena)

    monkeypatch.setattr(setup.shared, "register_again", register_slowly)
    setup.fake.regions.clear()
    with pytest.raises(DeadlinePassed):
        await setup.infer(0.1, is_shared=True)
    await setup.inferences.drain()

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


async def test_the_refusal_of_one_registration_does_not_stop_another(setup: Setup) -> None:
    """Of two requests that register a region again, one may be rejected; the other one still uses its slot."""
    setup.fake.accepts_regions = False
    with await setup.admit() as permit:
        buffer = InputBuffer(setup.shared, permit)
        buffer.allocate(SPEC.image_shape, np.uint8, SPEC.image_bytes)
        assert buffer.slot is not None
        assert not await setup.shared.register_again(buffer.slot.arena)
        setup.fake.accepts_regions = True
        setup.fake.regions.clear()
        assert await setup.inferences.run(SPEC, buffer, Deadline.after(5), "id", permit)

    assert "shared_memory_region" in setup.fake.requests[1].inputs[0].parameters
    assert setup.fake.regions == {buffer.slot.arena.name}


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
        ((grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found"), UnknownModel, False),
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


class Pixels(np.ndarray[Any, Any]):
    """An array whose instances can be counted."""


async def test_a_failed_inference_leaves_no_reference_cycle(setup: Setup) -> None:
    """Its image is freed at once, not when the garbage collector runs."""
    setup.fake.refusal = grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input"
    gc.collect()
    gc.disable()
    try:
        for _ in range(3):
            with suppress(InferenceFailed), await setup.admit() as permit:
                buffer = InputBuffer(setup.inline, permit)
                buffer.tensor = IMAGE.copy().view(Pixels)
                await setup.inferences.run(SPEC, buffer, Deadline.after(5), "id", permit)
        alive = [thing for thing in gc.get_objects() if isinstance(thing, Pixels)]
    finally:
        gc.enable()

    assert len(alive) <= 1  # of the buffer that is still a name here


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
        slots = len(arena.free_offsets)
        process.send_signal(signal.SIGSTOP)
        try:
            assert await eventually(lambda: process.status() == psutil.STATUS_STOPPED)
            assert json(await client.post("/predict/six_columns", content=SCENE), 504)["code"] == "deadline_passed"
            assert len(arena.free_offsets) == slots - 1
        finally:
            process.send_signal(signal.SIGCONT)

        assert await eventually(lambda: len(arena.free_offsets) == slots)
