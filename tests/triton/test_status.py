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


def rpc_error(status: grpc.StatusCode, details: str | None) -> grpc.RpcError:
    return grpc.aio.AioRpcError(status, grpc.aio.Metadata(), grpc.aio.Metadata(), details)


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
        ("UNAVAILABLE", "errors resolving triton:8001: [Domain name not found]", Unreachable),
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
        ("UNAUTHENTICATED", "Received http2 header with status: 401", Refused),
        ("PERMISSION_DENIED", "Received http2 header with status: 403", Refused),
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
    asked = type(from_query_error(rpc_error(grpc.StatusCode[status], text)))
    assert asked is (NoReply if issubclass(expected, DeadlinePassed) else expected)


@pytest.mark.parametrize("status", [status for status in grpc.StatusCode if status is not grpc.StatusCode.OK])
def test_every_status_has_an_error_and_a_message_of_one_line(status: grpc.StatusCode) -> None:
    for details, message in (("", ""), (None, ""), ("something new\nAt:\n  file.py", "something new")):
        for translate in (from_grpc_error, from_query_error):
            cause = rpc_error(status, details)
            error = translate(cause)
            assert own_message(error) == error.detail
            error.__cause__ = cause
            assert own_message(error) == (message or error.detail)
