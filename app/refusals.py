"""What Triton says when it refuses -> our errors."""

import grpc

from app.errors import DeadlinePassed, GatewayError, ModelNonsense, ModelNotReady, TritonUnavailable, UnknownModel

_STALE_REGION = "Unable to find shared memory region"
_IN_USE = "currently in use"

# By status and, since the status alone is ambiguous, a part of the message. First match wins.
# Source: measured on Triton 2.51.
_ERRORS: tuple[tuple[str, str, type[GatewayError], str], ...] = (
    ("UNAVAILABLE", "Request timeout expired", DeadlinePassed, "the request waited too long in the model's queue"),
    ("UNAVAILABLE", "maximum queue size", TritonUnavailable, "the model's queue is full"),
    ("UNAVAILABLE", "Request for unknown model", ModelNotReady, "the model is not loaded"),
    ("UNAVAILABLE", "", TritonUnavailable, "Triton does not answer"),
    ("NOT_FOUND", _STALE_REGION, TritonUnavailable, "Triton was started again, and does not know our memory"),
    ("NOT_FOUND", "", UnknownModel, "there is no such model"),
    ("DEADLINE_EXCEEDED", "", DeadlinePassed, "Triton did not answer in time"),
    ("INTERNAL", "is not healthy", TritonUnavailable, "the model's process has died"),
    ("CANCELLED", "", TritonUnavailable, "Triton dropped the request"),
)


def ours(error: grpc.RpcError) -> GatewayError:
    """Translate; Triton's own words are not for callers."""
    code, details = error.code().name, error.details() or ""
    for status, part, translated, detail in _ERRORS:
        if status == code and part in details:
            return translated(detail)
    return ModelNonsense("the model could not be run")


def of_question(error: grpc.RpcError) -> GatewayError:
    """Translate, for what is asked besides inferences: there, silence is no missed deadline of a caller."""
    refusal = ours(error)
    return TritonUnavailable("Triton does not answer") if isinstance(refusal, DeadlinePassed) else refusal


def is_stale(error: grpc.RpcError) -> bool:
    """Tell whether Triton does not know a region of shared memory; most likely it was restarted."""
    return _STALE_REGION in (error.details() or "")


def is_in_use(error: grpc.RpcError) -> bool:
    """Tell whether a region cannot be unregistered because an inference still reads it."""
    return _IN_USE in (error.details() or "")
