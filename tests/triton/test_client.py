"""The RPCs of the client: what Triton parses and answers, which errors it means, and what is known about it."""

import asyncio
import gc
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import msgspec
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as messages

from app.errors import (
    DeadlinePassed,
    GatewayError,
    InferenceFailed,
    InvalidModelOutput,
    ModelNotReady,
    TritonUnavailable,
    UnknownModel,
)
from app.model.spec import ModelSpec, from_triton_config
from app.triton import client as client_module
from app.triton.client import TritonClient
from app.triton.messages import InferResult, infer_request, read_response
from app.triton.server_info import ServerInfo
from app.triton.shared_memory import Arena, Slot
from app.triton.statistics import read_statistics
from app.triton.status import (
    Disconnected,
    Draining,
    ModelDied,
    ModelFailed,
    NoReply,
    Overloaded,
    Refused,
    Unanswered,
    UnknownRegion,
    Unreachable,
    from_query_error,
    own_message,
)
from tests.fakes.triton import CONFIG, SPEC, FakeTriton, serving, serving_bytes
from tests.faults.relay import relay
from tests.support import eventually

IMAGE = np.zeros(SPEC.image_shape, np.uint8)

Fake = tuple[FakeTriton, TritonClient]


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena(2 * IMAGE.nbytes)
    yield made
    made.close()


async def test_server_is_known_while_it_is_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton may come back with another version, and tell it late."""
    monkeypatch.setattr(client_module, "_QUERY_SECONDS", 0.1)
    fake = FakeTriton()
    async with serving(fake) as port:
        client = TritonClient(f"127.0.0.1:{port}")
        await eventually(lambda: client.server == ServerInfo("2.51.0"))
        fake.version, fake.extensions = "2.59.1", ["statistics"]
        assert [await client.read_server(), client.server] == [ServerInfo("2.59.1", ("statistics",)), ServerInfo("2.51.0")]
    await eventually(lambda: client.server is None)

    fake.query_refusal = grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"
    before = fake.server_reads
    async with serving(fake, port):
        await eventually(lambda: fake.server_reads > before)
        assert client.server is None
        fake.query_refusal = None
        await eventually(lambda: client.server == ServerInfo("2.59.1", ("statistics",)))
        assert client.connection > 1
        await client.close()


async def test_region_that_is_still_read_is_unregistered_later(fake_triton: Fake) -> None:
    """A killed worker may have left an inference that reads the region."""
    fake, client = fake_triton
    fake.regions, fake.still_read = {"region"}, 3
    await client.unregister("region")

    assert fake.regions == set()


@pytest.mark.parametrize(("version", "cancelled"), [("2.51.0", 0), ("2.59.1", 1)])
async def test_inference_without_an_answer_is_cancelled_only_at_a_new_triton(
    fake_triton: Fake, monkeypatch: pytest.MonkeyPatch, version: str, cancelled: int
) -> None:
    """An RPC to an old Triton, which may crash if it is cancelled, goes on, and may end until the client has closed."""
    fake, client = fake_triton
    fake.version = version
    monkeypatch.setattr(client_module, "_BACKSTOP_SECONDS", 0.2)
    await eventually(lambda: client.server == ServerInfo(version))
    fake.may_answer.clear()
    with pytest.raises(Unanswered):
        await client.infer(SPEC, [IMAGE], timeout_seconds=0.1)
    gc.collect()
    await client.read_server()

    await eventually(lambda: fake.cancelled == cancelled)
    assert fake.running == len(client.left) == 1 - cancelled
    closing = asyncio.create_task(client.close())
    await asyncio.sleep(0)
    fake.may_answer.set()
    await closing
    assert fake.cancelled == cancelled


async def test_answer_that_is_no_message_is_an_invalid_output() -> None:
    """Another program listens at the address, so `server` stays None."""
    async with serving_bytes(b"\xff\xff\xff") as url:
        client = TritonClient(url)
        questions = client.read_server(), client.list_models(), client.list_regions(), client.read_config("tiny")
        for question in (*questions, client.infer(SPEC, [IMAGE], timeout_seconds=5), read_statistics(client, 5)):
            with pytest.raises(InvalidModelOutput, match="cannot be read"):
                await question
        assert not await client.is_ready("tiny")
        assert client.server is None
        await client.close()


SHARED_MEMORY = ("SystemSharedMemoryRegister", "SystemSharedMemoryUnregister", "SystemSharedMemoryStatus")
CONTROLS = {*SHARED_MEMORY, "RepositoryIndex", "ModelStatistics"}
OTHERS = {"ServerMetadata", "ModelReady", "ModelMetadata", "ModelConfig", "ModelInfer"}


async def test_only_controls_carry_the_key_which_a_restart_may_change(
    arena: Arena, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake, path, keys = FakeTriton(), tmp_path / "control.key", dict[str, str | None]()

    async def note(name: str, answer: Any, request: Any, context: Any) -> Any:  # noqa: ANN401
        keys[name] = dict(context.invocation_metadata()).get("triton-grpc-protocol-nereid")
        return await answer(request, context)

    for name in CONTROLS | OTHERS:
        monkeypatch.setattr(fake, name, partial(note, name, getattr(fake, name)))
    async with serving(fake):
        client = TritonClient(fake.url, path)
        for key in (None, "0123456789abcdef", "other"):
            if key:
                path.write_text(key)
            await client.read_server()
            await client.is_ready("tiny")
            await client.read_config("tiny")
            await client.infer(SPEC, [IMAGE], timeout_seconds=5)
            await client.list_models()
            await client.register(arena)
            await client.list_regions()
            await client.unregister(arena.region)
            await read_statistics(client, 5)
            assert keys == dict.fromkeys(CONTROLS, key) | dict.fromkeys(OTHERS)
        await client.close()


@pytest.mark.faults
async def test_connection_may_take_as_long_as_a_lost_packet_delays_it() -> None:
    """TCP repeats a lost first packet after a second; the relay delays each connection by longer."""

    async def answer_late(*here: Any) -> None:  # noqa: ANN401
        await asyncio.sleep(1.5)
        await relay(here, await asyncio.open_connection("127.0.0.1", port))

    async with serving(FakeTriton()) as port, await asyncio.start_server(answer_late, "127.0.0.1", 0) as server:
        client = TritonClient(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await eventually(lambda: client.server is not None)
        await client.close()


BATCHED = from_triton_config({**CONFIG, "max_batch_size": 8}, "1")
PIXELS = np.arange(32 * 32 * 3, dtype=np.uint32).astype(np.uint8).reshape(SPEC.image_shape)


def parsed(spec: ModelSpec, *tensors: np.ndarray, seconds: float = 1.5, slot: Slot | None = None) -> messages.ModelInferRequest:
    """Serialize a request, and parse it as Triton does."""
    data = infer_request(spec, tensors, timeout_seconds=seconds, request_id="abc", slot=slot, priority=2)
    return messages.ModelInferRequest.FromString(data)


@pytest.mark.parametrize(("is_pinned", "version"), [(True, "7"), (False, "")])
def test_request_has_what_the_model_needs(version: str, *, is_pinned: bool) -> None:
    request = parsed(msgspec.structs.replace(SPEC, version="7", is_pinned=is_pinned, tells_decoded=True), PIXELS)
    (sent,) = request.inputs

    assert (request.model_name, request.model_version, request.id) == ("tiny", version, "abc")
    assert (sent.name, sent.datatype, list(sent.shape), len(sent.parameters)) == ("image", "UINT8", [32, 32, 3], 0)
    assert [output.name for output in request.outputs] == ["output0", "decoded"]
    assert list(request.raw_input_contents) == [PIXELS.tobytes()]
    assert request.parameters["priority"].uint64_param == 2


@pytest.mark.parametrize(("seconds", "microseconds"), [(1.5, 1_500_000), (-3, 1)])
def test_timeout_is_in_microseconds_and_never_zero(seconds: float, microseconds: int) -> None:
    """Zero would mean no time-out at all."""
    assert parsed(SPEC, PIXELS, seconds=seconds).parameters["timeout"].int64_param == microseconds


def test_batch_is_one_piece_inline_and_in_shared_memory() -> None:
    arena = Arena(4 * PIXELS.nbytes)
    slots = [slot for _ in range(4) if (slot := arena.take(PIXELS.nbytes))]
    tensors = [slot.array(SPEC.image_shape, np.uint8) for slot in slots[1:]]
    for number, tensor in enumerate(tensors):
        tensor[:] = PIXELS + number
    inline, shared = parsed(BATCHED, *tensors), parsed(BATCHED, *tensors, slot=slots[1])
    arena.close()

    assert list(inline.inputs[0].shape) == list(shared.inputs[0].shape) == [3, 32, 32, 3]
    assert inline.raw_input_contents[0] == np.stack(tensors).tobytes()
    assert not shared.raw_input_contents
    parameters = shared.inputs[0].parameters
    assert parameters["shared_memory_region"].string_param == arena.region
    assert parameters["shared_memory_offset"].int64_param == PIXELS.nbytes
    assert parameters["shared_memory_byte_size"].int64_param == 3 * PIXELS.nbytes


@pytest.mark.parametrize(
    ("datatype", "shape", "content"),
    [("FP32", [2, 6], b""), ("BYTES", [1], b"1234"), ("NONE", [1], b"1")],
)
def test_inconsistent_tensor_is_an_invalid_output(datatype: str, shape: list[int], content: bytes) -> None:
    """For example, Triton's Python backend returns empty tensors with an incompatible numpy."""
    answer = messages.ModelInferResponse()
    answer.outputs.add(name="output0", datatype=datatype, shape=shape)
    answer.raw_output_contents.append(content)
    with pytest.raises(InvalidModelOutput, match="output0"):
        read_response(answer)


def test_result_of_a_batch_is_split_by_image() -> None:
    boxes = np.arange(24, dtype=np.float32).reshape(3, 2, 4)
    parts = InferResult({"boxes": boxes}, "7").split(BATCHED, 3)
    for index, part in enumerate(parts):
        assert (part.version, part.outputs["boxes"].tolist()) == ("7", boxes[index : index + 1].tolist())

    result = InferResult({"count": np.array(5)}, "1")  # of a model without a batch dimension
    assert result.split(SPEC, 1) == [result]
    for shape in ((), (2, 4), (4, 4)):  # of another number of images
        with pytest.raises(InvalidModelOutput, match=r"tiny returned boxes of shape .* for a batch of 3"):
            InferResult({"boxes": np.zeros(shape)}, "1").split(BATCHED, 3)


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        ("UNAVAILABLE", "Request timeout expired", DeadlinePassed),
        ("UNAVAILABLE", "Exceeds maximum queue size", Overloaded),
        ("UNAVAILABLE", "Server is stopping, scheduler for model has stopped", Draining),
        ("UNAVAILABLE", "Request for unknown model: 'tiny' has no available versions", ModelNotReady),
        ("UNAVAILABLE", "This protocol is restricted, expecting header 'nereid'", InferenceFailed),
        ("UNAVAILABLE", "failed to connect to all addresses; last error: connection refused", Unreachable),
        ("UNAVAILABLE", "DNS resolution failed for triton:8001", Unreachable),
        ("UNAVAILABLE", "Socket closed", Disconnected),
        ("RESOURCE_EXHAUSTED", "not enough memory", Overloaded),
        ("INTERNAL", "Failed to increase the shared memory pool size for key 'nereid'", Overloaded),
        ("INTERNAL", "Stub process 'tiny_0_0' is not healthy.", ModelDied),
        ("INTERNAL", "Received RST_STREAM with error code 2", Disconnected),
        ("INTERNAL", "onnx runtime error 1", ModelFailed),
        ("NOT_FOUND", "Request for unknown model: 'tiny' is not found", UnknownModel),
        ("NOT_FOUND", "Unable to find shared memory region: 'nereid-1-0'", UnknownRegion),
        ("DEADLINE_EXCEEDED", "Deadline Exceeded", Unanswered),
        ("CANCELLED", "RPC ended", TritonUnavailable),
        ("INVALID_ARGUMENT", "unexpected shape for input", InferenceFailed),
        ("UNIMPLEMENTED", "Received http2 header with status: 404", Refused),
        ("UNKNOWN", "/opt/secret/path", Refused),
    ],
)
async def test_status_and_message_of_a_refusal_determine_the_error(
    fake_triton: tuple[FakeTriton, TritonClient], status: str, text: str, expected: type[GatewayError]
) -> None:
    """The status alone is ambiguous. The caller never sees the message, and may retry whatever is unavailable."""
    fake, client = fake_triton
    fake.refusal = grpc.StatusCode[status], text
    with pytest.raises(GatewayError) as caught:
        await client.infer(SPEC, [np.zeros(SPEC.image_shape, np.uint8)], timeout_seconds=5)

    error = caught.value
    assert type(error) is expected
    assert text not in error.detail
    assert own_message(error) == text
    if isinstance(error, TritonUnavailable):
        assert (error.status, error.code, error.retry_after_seconds) == (503, "triton_unavailable", 1)
    assert isinstance(error.__cause__, grpc.RpcError)
    asked = type(from_query_error(error.__cause__))
    assert asked is (NoReply if issubclass(expected, DeadlinePassed) else expected)
