"""What the gateway makes of Triton's answers, from a server that gives the ones a real one gives too rarely."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

from app import contract
from app.arena import Arena, Slot
from app.contract import Contract
from app.errors import DeadlinePassed, GatewayError, ModelNonsense, ModelNotReady, TritonUnavailable, UnknownModel
from app.triton import Triton
from tests.conftest import free_port

MODEL: Contract = contract.read(
    {
        "name": "tiny",
        "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [32, 32, 3]}],
        "output": [{"name": "output0", "data_type": "TYPE_FP32", "dims": [2, 6]}],
    },
    "1",
)
PICTURE = np.zeros(MODEL.shape, np.uint8)


class Stub(GRPCInferenceServiceServicer):  # type: ignore[misc]  # generated code has no types
    """A Triton that answers as it is told."""

    def __init__(self) -> None:
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        self.answer = messages.ModelInferResponse(model_name="tiny", model_version="1")
        self.version = "2.51.0"
        self.asked: list[messages.ModelInferRequest] = []
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self.cancelled = 0
        self.knows: set[str] = set()
        self.takes_regions = True
        self.metadata_asked = 0
        self.still_read = 0

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        self.asked.append(request)
        try:
            await self.may_answer.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        lent = request.inputs[0].parameters
        if "shared_memory_region" in lent and lent["shared_memory_region"].string_param not in self.knows:
            await context.abort(grpc.StatusCode.NOT_FOUND, "Unable to find shared memory region: 'nereid'")
        if self.refusal:
            await context.abort(*self.refusal)
        return self.answer

    async def SystemSharedMemoryRegister(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if self.refusal:
            await context.abort(*self.refusal)
        if not self.takes_regions:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "Unable to open shared memory region")
        self.knows.add(request.name)
        return messages.SystemSharedMemoryRegisterResponse()

    async def SystemSharedMemoryUnregister(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        if self.still_read:
            self.still_read -= 1
            await context.abort(grpc.StatusCode.INTERNAL, f"Cannot unregister {request.name}, it is currently in use.")
        self.knows.discard(request.name)
        return messages.SystemSharedMemoryUnregisterResponse()

    async def ModelMetadata(self, request: Any, _: Any) -> Any:  # noqa: ANN401, N802
        self.metadata_asked += 1
        return messages.ModelMetadataResponse(name=request.name, versions=["1"])

    async def ModelConfig(self, request: Any, _: Any) -> Any:  # noqa: ANN401, N802
        answer = messages.ModelConfigResponse()
        answer.config.name = request.name
        answer.config.input.add(name="image", data_type="TYPE_UINT8", dims=[32, 32, 3])
        answer.config.output.add(name="output0", data_type="TYPE_FP32", dims=[2, 6])
        return answer

    async def ServerMetadata(self, _: Any, __: Any) -> Any:  # noqa: ANN401, N802
        return messages.ServerMetadataResponse(version=self.version)

    async def RepositoryIndex(self, _: Any, __: Any) -> Any:  # noqa: ANN401, N802
        index = messages.RepositoryIndexResponse()
        for name, version, state in (("a", "1", "READY"), ("a", "2", "UNAVAILABLE"), ("b", "1", "UNAVAILABLE"), ("c", "", "")):
            index.models.add(name=name, version=version, state=state)
        return index


@pytest.fixture
def lent() -> Iterator[Slot]:
    """The only slot of an arena."""
    made = Arena(PICTURE.nbytes, 1)
    slot = made.take()
    assert slot
    yield slot
    made.close()


@pytest.fixture
async def stub() -> AsyncIterator[tuple[Stub, Triton]]:
    server, told, port = grpc.aio.server(), Stub(), free_port()
    add_GRPCInferenceServiceServicer_to_server(told, server)
    server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    triton = Triton(f"127.0.0.1:{port}")
    yield told, triton
    await triton.close()
    await server.stop(None)


@pytest.mark.parametrize(
    ("status", "text", "ours"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Request timeout expired", DeadlinePassed),
        (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size", TritonUnavailable),
        (grpc.StatusCode.UNAVAILABLE, "Server is stopping, scheduler for model has stopped", TritonUnavailable),
        (grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions", ModelNotReady),
        (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found", UnknownModel),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", DeadlinePassed),
        (grpc.StatusCode.CANCELLED, "", TritonUnavailable),
        (grpc.StatusCode.INTERNAL, "Stub process 'tiny_0_0' is not healthy.", TritonUnavailable),
        (grpc.StatusCode.INTERNAL, "onnx runtime error 1", ModelNonsense),
        (grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input", ModelNonsense),
        (grpc.StatusCode.UNKNOWN, "/opt/secret/path", ModelNonsense),
    ],
)
async def test_every_refusal_has_its_meaning(
    stub: tuple[Stub, Triton], status: grpc.StatusCode, text: str, ours: type[GatewayError]
) -> None:
    """The status alone is ambiguous, so the text decides; it is never passed on."""
    told, triton = stub
    told.refusal = status, text

    with pytest.raises(ours) as caught:
        await triton.infer(MODEL, PICTURE, 5, "id")
    assert not text or text not in caught.value.detail


@pytest.mark.parametrize(
    ("datatype", "shape", "content"),
    [("FP32", [2, 6], b""), ("FP32", [2, 6], b"1234"), ("FP32", [-1, 6, 0], b""), ("BYTES", [1], b"1234"), ("NONE", [1], b"1")],
)
async def test_a_tensor_that_does_not_hold_together_is_nonsense(
    stub: tuple[Stub, Triton], datatype: str, shape: list[int], content: bytes
) -> None:
    """Above all an empty one, which Triton's Python backend returns under the wrong numpy."""
    told, triton = stub
    told.answer.outputs.add(name="output0", datatype=datatype, shape=shape)
    told.answer.raw_output_contents.append(content)

    with pytest.raises(ModelNonsense, match="output0"):
        await triton.infer(MODEL, PICTURE, 5, "id")


async def test_what_was_not_returned_is_not_there(stub: tuple[Stub, Triton]) -> None:
    """Whether it had to be is for others to say."""
    _, triton = stub

    assert (await triton.infer(MODEL, PICTURE, 5, "id")).outputs == {}


async def test_the_time_that_is_left_goes_along(stub: tuple[Stub, Triton]) -> None:
    """In microseconds, for Triton's queue, with the id of the request."""
    told, triton = stub
    await triton.infer(MODEL, PICTURE, 1.5, "abc")
    (request,) = told.asked

    assert request.id == "abc"
    assert request.parameters["timeout"].int64_param == pytest.approx(1_500_000, abs=100_000)
    assert request.raw_input_contents[0] == PICTURE.tobytes()


async def test_no_time_left_is_no_answer(stub: tuple[Stub, Triton]) -> None:
    """A request that is late before it is sent is late."""
    _, triton = stub

    with pytest.raises(DeadlinePassed):
        await triton.infer(MODEL, PICTURE, 0, "id")


@pytest.mark.parametrize(
    ("version", "may"), [("2.51.0", False), ("2.59.0", False), ("2.59.1", True), ("2.60.0dev", True), ("3.0.0", True), ("", False)]
)
async def test_only_a_new_triton_survives_a_cancel(stub: tuple[Stub, Triton], version: str, may: bool) -> None:  # noqa: FBT001
    """The version is asked of the server, not assumed."""
    told, triton = stub
    told.version = version

    assert await triton.version() == version
    assert triton.may_cancel is may


@pytest.mark.parametrize(
    ("version", "with_slot", "is_cancelled"), [("2.51.0", False, False), ("2.59.1", False, True), ("2.59.1", True, False)]
)
async def test_an_inference_that_was_given_up_on(
    stub: tuple[Stub, Triton],
    version: str,
    with_slot: bool,  # noqa: FBT001
    is_cancelled: bool,  # noqa: FBT001
    lent: Slot,
) -> None:
    """It is cancelled if Triton survives that and nothing is lent to it; else it goes on, and keeps what it reads."""
    told, triton = stub
    told.version = version
    await triton.version()
    told.knows.add(lent.arena.name)
    told.may_answer.clear()
    slot = lent if with_slot else None
    with pytest.raises(DeadlinePassed):
        await triton.infer(MODEL, PICTURE, 0.1, "late", slot)
    leaving = asyncio.ensure_future(triton.infer(MODEL, PICTURE, 30, "gone", None))
    await asyncio.sleep(0.1)
    leaving.cancel()
    await asyncio.sleep(0.1)

    assert told.cancelled == (2 if is_cancelled else 1 if with_slot else 0)
    assert (lent.offset in lent.arena.free_offsets) is False
    told.may_answer.set()
    await triton.drain()
    assert (lent.offset in lent.arena.free_offsets) is with_slot


async def test_nothing_more_is_asked_of_a_triton_that_is_lost(stub: tuple[Stub, Triton], lent: Slot) -> None:
    """Each inference that was given up on holds its pixels; there is an end to that."""
    told, triton = stub
    told.may_answer.clear()
    given_up = await asyncio.gather(*(triton.infer(MODEL, PICTURE, 0.2, "late") for _ in range(64)), return_exceptions=True)
    assert {type(error) for error in given_up} == {DeadlinePassed}

    with pytest.raises(TritonUnavailable, match="given up"):
        await triton.infer(MODEL, PICTURE, 5, "id", lent)
    assert lent.offset in lent.arena.free_offsets
    told.may_answer.set()
    await triton.drain()
    assert await triton.infer(MODEL, PICTURE, 5, "id")


@pytest.mark.parametrize("takes_regions", [True, False])
async def test_a_forgotten_region_is_registered_again_or_done_without(
    stub: tuple[Stub, Triton],
    takes_regions: bool,  # noqa: FBT001
    lent: Slot,
) -> None:
    """Within the same request, which gets its answer either way."""
    told, triton = stub
    told.takes_regions = takes_regions
    assert await triton.infer(MODEL, PICTURE, 5, "id", lent)

    first, second = told.asked
    assert "shared_memory_region" in first.inputs[0].parameters
    assert ("shared_memory_region" in second.inputs[0].parameters) is takes_regions
    assert list(second.raw_input_contents) == ([] if takes_regions else [PICTURE.tobytes()])
    assert lent.arena.is_refused is not takes_regions
    assert lent.offset in lent.arena.free_offsets


async def test_one_refusal_does_not_speak_for_another(stub: tuple[Stub, Triton], lent: Slot) -> None:
    """Of two requests that register again, one may be refused; the arena is given up all the same."""
    told, triton = stub
    lent.arena.is_refused = True
    assert await triton.infer(MODEL, PICTURE, 5, "id", lent)

    assert "shared_memory_region" in told.asked[1].inputs[0].parameters
    assert told.knows == {lent.arena.name}


async def test_silence_of_triton_is_unavailability(stub: tuple[Stub, Triton]) -> None:
    """What is asked besides inferences has no deadline of a caller to miss."""
    told, triton = stub
    told.refusal = grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
    with pytest.raises(TritonUnavailable):
        await triton.register("region", 4096)


async def test_a_region_that_is_forgotten_twice_is_no_missing_model(stub: tuple[Stub, Triton], lent: Slot) -> None:
    """Two Tritons behind one address, say: whoever asks may ask again."""
    told, triton = stub
    told.knows = Forgetful()
    with pytest.raises(TritonUnavailable):
        await triton.infer(MODEL, PICTURE, 5, "id", lent)

    assert lent.offset in lent.arena.free_offsets


class Forgetful(set[str]):
    """Never knows what it was told."""

    def add(self, _: str) -> None:
        """Forget."""


async def test_a_region_that_is_still_read_is_unregistered_later(stub: tuple[Stub, Triton]) -> None:
    """A worker that was killed may have left an inference behind that reads it."""
    told, triton = stub
    told.knows, told.still_read = {"region"}, 3
    await triton.unregister("region")

    assert told.knows == set()


async def test_many_ask_for_a_contract_once(stub: tuple[Stub, Triton]) -> None:
    """Also when it has to be read again; a full queue is no reason to."""
    told, triton = stub
    await asyncio.gather(*(triton.contract("tiny") for _ in range(50)))
    assert told.metadata_asked == 1
    told.refusal = grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size"
    with pytest.raises(TritonUnavailable):
        await triton.infer(MODEL, PICTURE, 5, "id")
    await triton.contract("tiny")
    assert told.metadata_asked == 1
    told.refusal = grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input"
    with pytest.raises(ModelNonsense):
        await triton.infer(MODEL, PICTURE, 5, "id")
    await triton.contract("tiny")

    assert told.metadata_asked == 2


async def test_a_model_is_ready_if_one_of_its_versions_is(stub: tuple[Stub, Triton]) -> None:
    """The index has a line for each version; what was never loaded has no state."""
    _, triton = stub

    assert await triton.models() == {"a": "READY", "b": "UNAVAILABLE", "c": ""}
