"""The context of one request, stored in its ASGI scope for routes, error handlers and the log line."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from litestar import Request
from litestar.types import HTTPScope, Scope

from app.resilience.fairness import ANYBODY
from app.telemetry.timing import Timing
from app.telemetry.trace_context import TraceContext

AnyRequest = Request[Any, Any, Any]
PAUSE_SECONDS = 10.0
"""Maximum time between two reads of a request body, or two writes of a response."""
STREAM_PATTERN = "^[A-Za-z0-9._-]{1,64}$"
"""Of the header X-Stream."""


class BodyLimits(NamedTuple):
    """Size and time limits of a request body."""

    max_bytes: int
    total_seconds: float


class RequestContext:
    """Request id, trace, timing and log fields of one request, and the state of its response."""

    accept = b""
    trace: TraceContext | None = None
    """The request's own span, or the caller's if tracing is off here; None if the request belongs to no trace."""
    status = 0
    request_bytes = 0
    response_bytes = 0
    has_model_route = False
    body_limits: BodyLimits
    """Limits of the body, whose time is also that of a response; set by the guards of model routes."""
    slow_request_ms = 0.0
    scopes: frozenset[str] | None = None
    scope = "detect"
    is_circuit_open = False
    """Whether no Triton could run the model when the request came."""
    is_anonymous = False
    """Whether the headers have no API key, but the body may contain one."""
    client_address = ""
    model = ""
    """Reference of the model that the path, headers or query name, or of the default model; empty if the body may name the
    model, and on other routes."""
    caller = ANYBODY
    """The key once it is identified; before, and without keys, the client's address."""
    tenant = ""
    stream = ""
    """The stream of which the request has the newest image; empty for none."""
    is_body_received = False
    is_client_gone = False
    is_detail_logged = True
    is_passed_on = False
    """Whether another process answers the request, counts it and logs it; or, for a report to workers, nobody does."""
    error = ""
    failed_stage = ""
    rejection_reason = ""

    headers: Mapping[bytes, bytes] = MappingProxyType({})
    """The request's headers, of several with one name the last."""

    def __init__(self, request_id: str, content_type: str, content_encoding: str = "") -> None:
        self.request_id = request_id
        self.content_type = content_type
        self.content_encoding = content_encoding
        self.timing = Timing()
        self.after_answer: list[Callable[[], object]] = []
        self.log_fields: dict[str, Any] = {}

    @property
    def ending(self) -> dict[str, Any]:
        """The fields `total_time_ms` and `request_id`, with which an answer ends."""
        return {"total_time_ms": round(self.timing.total, 2), "request_id": self.request_id}

    def end_answer(self) -> None:
        """Begin what waits until the response has been sent."""
        while self.after_answer:
            self.after_answer.pop()()


def context_of(scope: Scope) -> RequestContext:
    """Return the context of the request with this scope."""
    context: RequestContext = scope["state"]["request_context"]
    return context


def header_of(scope: HTTPScope, wanted: bytes) -> str:
    """Return the value of a header; empty if absent. Unlike Litestar's lookup, it builds no object of all headers."""
    return next((value.decode("latin-1") for name, value in scope["headers"] if name == wanted), "")
