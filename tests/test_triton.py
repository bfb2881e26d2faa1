"""What the gateway makes of Triton's answers, from a server that gives the ones a real one gives too rarely."""

from collections.abc import AsyncIterator
from typing import Any

import grpc
import numpy as np
import pytest
from tritonclient.grpc import service_pb2 as messages
from tritonclient.grpc.service_pb2_grpc import GRPCInferenceServiceServicer, add_GRPCInferenceServiceServicer_to_server

from app import contract
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

    async def ModelInfer(self, request: Any, context: Any) -> Any:  # noqa: ANN401, N802
        self.asked.append(request)
        if self.refusal:
            await context.abort(*self.refusal)
        return self.answer

    async def ServerMetadata(self, _: Any, __: Any) -> Any:  # noqa: ANN401, N802
        return messages.ServerMetadataResponse(version=self.version)

    async def RepositoryIndex(self, _: Any, __: Any) -> Any:  # noqa: ANN401, N802
        index = messages.RepositoryIndexResponse()
        for name, version, state in (("a", "1", "READY"), ("a", "2", "UNAVAILABLE"), ("b", "1", "UNAVAILABLE"), ("c", "", "")):
            index.models.add(name=name, version=version, state=state)
        return index


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
    assert request.parameters["timeout"].int64_param == 1_500_000
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


async def test_a_model_is_ready_if_one_of_its_versions_is(stub: tuple[Stub, Triton]) -> None:
    """The index has a line for each version; what was never loaded has no state."""
    _, triton = stub

    assert await triton.models() == {"a": "READY", "b": "UNAVAILABLE", "c": ""}
