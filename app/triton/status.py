"""Translate gRPC errors to the gateway's errors."""

import grpc

from app.errors import CircuitOpen, DeadlinePassed, GatewayError, InferenceFailed, ModelNotReady, TritonUnavailable, UnknownModel


class Overloaded(TritonUnavailable):
    """Triton works, but has no room for the request now."""


class Unreachable(TritonUnavailable):
    """There is no connection to Triton, and the request was not sent."""


class Disconnected(TritonUnavailable):
    """The connection broke. Triton may still process the request, and read its shared memory."""


class Unanswered(DeadlinePassed):
    """Triton did not answer an inference in time. It may still process the request, and read its shared memory."""


class Draining(TritonUnavailable):
    """Triton is being stopped, and accepts no more requests."""


class ModelDied(TritonUnavailable):
    """The model's process has died. Triton rejects requests for the model until it is restarted, and yet calls it ready."""


class ModelReplaced(ModelNotReady):
    """The model was replaced by another one after a request was prepared, so the answer is not valid."""


class NotLoadedYet(ModelNotReady):
    """The model is loaded on demand, but not in time for this request."""


class Refused(TritonUnavailable):
    """The server at Triton's address, possibly a proxy or another program, does not accept requests of the gateway."""


class NoReply(TritonUnavailable):
    """Triton did not answer a call other than an inference in time."""


class ModelFailed(InferenceFailed):
    """The model, the image or the GPU of this Triton is broken. Only a call to another Triton can tell which."""


class WrongAnswer(CircuitOpen):
    """Triton has answered, but is known to answer wrongly for the model."""


class UnknownRegion(TritonUnavailable):
    """Triton does not know a shared-memory region; most likely it was restarted."""


# By status and, because the status alone is ambiguous, by a part of the message. The first match wins.
# Source: measured on Triton 2.51 and grpcio 1.85.
_ERRORS: tuple[tuple[str, str, type[GatewayError], str], ...] = (
    ("UNAVAILABLE", "Request timeout expired", DeadlinePassed, "the request waited too long in the model's queue"),
    ("UNAVAILABLE", "maximum queue size", Overloaded, "the model's queue is full"),
    ("UNAVAILABLE", "Request for unknown model", ModelNotReady, "the model is not loaded"),
    ("UNAVAILABLE", "Server is stopping", Draining, "Triton is being stopped"),
    ("UNAVAILABLE", "protocol is restricted", InferenceFailed, "Triton does not allow the gateway to do this"),
    ("UNAVAILABLE", "failed to connect", Unreachable, "Triton does not answer"),
    ("UNAVAILABLE", "DNS resolution failed", Unreachable, "Triton does not answer"),
    ("UNAVAILABLE", "errors resolving", Unreachable, "Triton does not answer"),
    ("UNAVAILABLE", "", Disconnected, "Triton does not answer"),
    ("RESOURCE_EXHAUSTED", "", Overloaded, "Triton has no memory left for the request"),
    ("INTERNAL", "shared memory pool", Overloaded, "Triton has no memory left for the request"),
    ("NOT_FOUND", "Unable to find shared memory region", UnknownRegion, "Triton was restarted; retry the request"),
    ("NOT_FOUND", "", UnknownModel, "there is no such model"),
    ("DEADLINE_EXCEEDED", "", Unanswered, "Triton did not answer in time"),
    ("INTERNAL", "is not healthy", ModelDied, "the model's process has died"),
    ("INTERNAL", "Failed to obtain the health mutex", ModelDied, "the model's process has died"),  # which it held
    ("INTERNAL", "RST_STREAM", Disconnected, "the connection to Triton broke"),
    ("INTERNAL", "", ModelFailed, "Triton reported an error of the model"),
    ("UNAUTHENTICATED", "", Refused, "Triton does not accept the gateway's credentials"),
    ("PERMISSION_DENIED", "", Refused, "Triton does not allow the gateway to call it"),
    ("UNIMPLEMENTED", "", Refused, "the server at Triton's address does not answer as Triton does"),
    ("UNKNOWN", "", Refused, "the server at Triton's address does not answer as Triton does"),
    ("CANCELLED", "", TritonUnavailable, "Triton dropped the request"),
)


def from_grpc_error(error: grpc.RpcError) -> GatewayError:
    """Translate the error of an inference. Triton's own message is replaced, because callers must not see it."""
    code, details = error.code().name, error.details() or ""
    for status, part, translated, detail in _ERRORS:
        if status == code and part in details:
            return translated(detail)
    return InferenceFailed("Triton reported an error of the model")


def from_query_error(error: grpc.RpcError) -> GatewayError:
    """Translate the error of any other call, whose time-out is not a missed deadline of the caller."""
    translated = from_grpc_error(error)
    return NoReply("Triton does not answer") if isinstance(translated, DeadlinePassed) else translated


def own_message(error: GatewayError) -> str:
    """Return the first line of Triton's own message, for operators; `detail` if there is no such message."""
    cause = error.__cause__
    text = cause.details() if isinstance(cause, grpc.RpcError) else None
    return (text or error.detail).strip().partition("\n")[0]
