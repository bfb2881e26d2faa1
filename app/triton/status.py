"""Translate gRPC errors to the gateway's errors."""

import grpc

from app.errors import DeadlinePassed, GatewayError, InferenceFailed, ModelNotReady, TritonUnavailable, UnknownModel


class Overloaded(TritonUnavailable):
    """Triton works, but has no room for the request now."""


class Unreachable(TritonUnavailable):
    """There is no connection to Triton: the request was not sent."""


class Disconnected(TritonUnavailable):
    """The connection broke: Triton may still work on the request, and read its shared memory."""


class Unanswered(DeadlinePassed):
    """Triton did not answer for so long that the call was ended: it may still work on the request."""


class Draining(TritonUnavailable):
    """Triton is being stopped, and takes no more requests."""


class ModelDied(TritonUnavailable):
    """The process that runs the model has ended: Triton rejects every request for it, until it has started another one."""


class ModelReplaced(ModelNotReady):
    """The model was replaced by another one between the preparation of a request and its answer, which says nothing therefore."""


class Refused(TritonUnavailable):
    """What answers at Triton's address does not take requests of the gateway: a proxy, or another server."""


class NoReply(TritonUnavailable):
    """Triton did not answer a question in time."""


class ModelFailed(InferenceFailed):
    """The model, the image or the GPU of this Triton is broken: only another Triton can tell."""


class UnknownRegion(TritonUnavailable):
    """Triton does not know a shared-memory region; most likely it was restarted."""


_RESTRICTED = "protocol is restricted"
# By status and, because the status alone is ambiguous, a part of the message. The first match wins.
# Source: measured on Triton 2.51 and grpcio 1.85.
_ERRORS: tuple[tuple[str, str, type[GatewayError], str], ...] = (
    ("UNAVAILABLE", "Request timeout expired", DeadlinePassed, "the request waited too long in the model's queue"),
    ("UNAVAILABLE", "maximum queue size", Overloaded, "the model's queue is full"),
    ("UNAVAILABLE", "Request for unknown model", ModelNotReady, "the model is not loaded"),
    ("UNAVAILABLE", "Server is stopping", Draining, "Triton is being stopped"),
    ("UNAVAILABLE", _RESTRICTED, InferenceFailed, "Triton does not allow the gateway to do this"),
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
    ("INTERNAL", "RST_STREAM", Disconnected, "the connection to Triton broke"),
    ("INTERNAL", "", ModelFailed, "Triton reported an error of the model"),
    ("UNAUTHENTICATED", "", Refused, "Triton does not accept the gateway's credentials"),
    ("PERMISSION_DENIED", "", Refused, "Triton does not allow the gateway to call it"),
    ("UNIMPLEMENTED", "", Refused, "the server at Triton's address does not answer as Triton does"),
    ("UNKNOWN", "", Refused, "the server at Triton's address does not answer as Triton does"),
    ("CANCELLED", "", TritonUnavailable, "Triton dropped the request"),
)
_REGION_IN_USE = "currently in use"


def from_grpc_error(error: grpc.RpcError) -> GatewayError:
    """Translate the error of an inference. Triton's own message is not for callers."""
    code, details = error.code().name, error.details() or ""
    for status, part, translated, detail in _ERRORS:
        if status == code and part in details:
            return translated(detail)
    return InferenceFailed("Triton reported an error of the model")


def from_query_error(error: grpc.RpcError) -> GatewayError:
    """Translate the error of any other call, where a time-out is not a missed deadline of the caller."""
    translated = from_grpc_error(error)
    return NoReply("Triton does not answer") if isinstance(translated, DeadlinePassed) else translated


def own_message(error: GatewayError) -> str:
    """Return the first line of what Triton itself has said, for whoever runs the gateway; `detail` if it has said nothing."""
    cause = error.__cause__
    text = cause.details() if isinstance(cause, grpc.RpcError) else None
    return (text or error.detail).strip().partition("\n")[0]


def is_restricted(error: grpc.RpcError) -> bool:
    """Return whether Triton asks for a key."""
    return _RESTRICTED in (error.details() or "")


def is_region_in_use(error: grpc.RpcError) -> bool:
    """Return whether a region cannot be unregistered because an inference still reads it."""
    return _REGION_IN_USE in (error.details() or "")
