"""Translation of gRPC errors to errors of the gateway."""

import grpc
import numpy as np
import pytest

from app.errors import DeadlinePassed, GatewayError, InferenceFailed, ModelNotReady, TritonUnavailable, UnknownModel
from app.triton.client import TritonClient
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
    from_grpc_error,
    from_query_error,
    own_message,
)
from tests.fakes.triton import SPEC, FakeTriton

IMAGE = np.zeros(SPEC.image_shape, np.uint8)


def rpc_error(status: grpc.StatusCode, details: str | None) -> grpc.RpcError:
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


@pytest.mark.parametrize(
    ("status", "text", "expected"),
    [
        (grpc.StatusCode.UNAVAILABLE, "Request timeout expired", DeadlinePassed),
        (grpc.StatusCode.UNAVAILABLE, "Exceeds maximum queue size", Overloaded),
        (grpc.StatusCode.UNAVAILABLE, "Server is stopping, scheduler for model has stopped", Draining),
        (grpc.StatusCode.UNAVAILABLE, "Request for unknown model: 'tiny' has no available versions", ModelNotReady),
        (grpc.StatusCode.UNAVAILABLE, "This protocol is restricted, expecting header 'nereid'", InferenceFailed),
        (grpc.StatusCode.UNAVAILABLE, "failed to connect to all addresses; last error: connection refused", Unreachable),
        (grpc.StatusCode.UNAVAILABLE, "DNS resolution failed for triton:8001", Unreachable),
        (grpc.StatusCode.UNAVAILABLE, "errors resolving triton:8001: [Domain name not found]", Unreachable),
        (grpc.StatusCode.UNAVAILABLE, "Socket closed", Disconnected),
        (grpc.StatusCode.UNAVAILABLE, "", Disconnected),
        (grpc.StatusCode.RESOURCE_EXHAUSTED, "not enough memory", Overloaded),
        (grpc.StatusCode.INTERNAL, "Failed to increase the shared memory pool size for key 'nereid'", Overloaded),
        (grpc.StatusCode.NOT_FOUND, "Request for unknown model: 'tiny' is not found", UnknownModel),
        (grpc.StatusCode.NOT_FOUND, "Unable to find shared memory region: 'nereid-1-0'", UnknownRegion),
        (grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded", Unanswered),
        (grpc.StatusCode.CANCELLED, "", TritonUnavailable),
        (grpc.StatusCode.INTERNAL, "Stub process 'tiny_0_0' is not healthy.", ModelDied),
        (grpc.StatusCode.INTERNAL, "onnx runtime error 1", ModelFailed),
        (grpc.StatusCode.INVALID_ARGUMENT, "unexpected shape for input", InferenceFailed),
        (grpc.StatusCode.INTERNAL, "Received RST_STREAM with error code 2", Disconnected),
        (grpc.StatusCode.UNAUTHENTICATED, "Received http2 header with status: 401", Refused),
        (grpc.StatusCode.PERMISSION_DENIED, "Received http2 header with status: 403", Refused),
        (grpc.StatusCode.UNIMPLEMENTED, "Received http2 header with status: 404", Refused),
        (grpc.StatusCode.UNKNOWN, "/opt/secret/path", Refused),
    ],
)
async def test_status_and_message_of_a_refusal_determine_the_error(
    fake_triton: tuple[FakeTriton, TritonClient], status: grpc.StatusCode, text: str, expected: type[GatewayError]
) -> None:
    """The status alone is ambiguous. The caller never sees the message."""
    fake, client = fake_triton
    fake.refusal = status, text

    with pytest.raises(GatewayError) as caught:
        await client.infer(SPEC, [IMAGE], timeout_seconds=5, request_id="id")
    assert type(caught.value) is expected
    assert not text or text not in caught.value.detail
    assert isinstance(caught.value.__cause__, grpc.RpcError)


@pytest.mark.parametrize("status", [status for status in grpc.StatusCode if status is not grpc.StatusCode.OK])
@pytest.mark.parametrize("details", ["", None, "something new"])
def test_every_status_has_an_error(status: grpc.StatusCode, details: str | None) -> None:
    """This includes unknown messages and missing ones."""
    assert isinstance(from_grpc_error(rpc_error(status, details)), GatewayError)
    assert isinstance(from_query_error(rpc_error(status, details)), GatewayError)


@pytest.mark.parametrize("kind", [UnknownRegion, Unreachable, Disconnected, Draining, Overloaded, ModelDied, Refused, NoReply])
def test_every_way_to_be_unavailable_is_the_same_for_a_caller(kind: type[TritonUnavailable]) -> None:
    """The caller may retry, whether or not the gateway has retried."""
    assert issubclass(kind, TritonUnavailable)
    assert (kind.status, kind.code, kind.retry_after_seconds) == (503, "triton_unavailable", 1)


def test_a_query_that_times_out_is_an_unavailable_triton() -> None:
    """Only a time-out of an inference is a missed deadline of the caller."""
    error = rpc_error(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded")

    assert type(from_grpc_error(error)) is Unanswered
    assert type(from_query_error(error)) is NoReply


@pytest.mark.parametrize(
    ("text", "expected"), [("Request for unknown model: 'x' is not found", UnknownModel), ("Unable to open", InferenceFailed)]
)
def test_other_refusals_of_queries_are_those_of_inferences(text: str, expected: type[GatewayError]) -> None:
    status = grpc.StatusCode.NOT_FOUND if expected is UnknownModel else grpc.StatusCode.INVALID_ARGUMENT

    assert type(from_query_error(rpc_error(status, text))) is expected


@pytest.mark.parametrize(
    ("details", "expected"),
    [("Unable to open shared memory\nAt:\n  file.py", "Unable to open shared memory"), ("", "for callers"), (None, "for callers")],
)
def test_message_of_triton_is_for_the_log_only(details: str | None, expected: str) -> None:
    error = InferenceFailed("for callers")
    error.__cause__ = rpc_error(grpc.StatusCode.INTERNAL, details)

    assert own_message(error) == expected
    assert own_message(InferenceFailed("for callers")) == "for callers"
