"""The context of one request, stored in its ASGI scope for routes, error handlers and the log line."""

from typing import Any

from litestar.types import Scope

from app.api.admission.keys import ApiKey
from app.api.receiving.client_watch import BodyLimits
from app.resilience.admission import WHOLE
from app.telemetry.timing import Timing
from app.telemetry.trace_context import TraceContext


class RequestContext:
    """Request id, trace, timing and log fields of one request, and what is known of its response."""

    def __init__(self, request_id: str, content_type: str, content_encoding: str = "") -> None:
        self.request_id = request_id
        self.content_type = content_type
        """The `Content-Type` header; empty if there is none."""
        self.accept = b""
        """The `Accept` header, of several lines if there are several; empty if there is none."""
        self.content_encoding = content_encoding
        """The `Content-Encoding` header; empty if there is none."""
        self.timing = Timing()
        self.trace: TraceContext | None = None
        """The request's own span, or its caller's if there is no tracing here; None if it belongs to no trace."""
        self.status = 0
        """Status of the response; 0 until it is sent."""
        self.request_bytes = 0
        """Size of the body, as far as it has been received."""
        self.response_bytes = 0
        """Size of the response's body, as far as it has been sent."""
        self.has_model_route = False
        """Whether `api/dispatch` has found its route for models, and noted its key and its model."""
        self.max_body_bytes = 0
        """How long the body may be."""
        self.body_limits: BodyLimits
        """Set by the guards of routes for models."""
        self.slow_request_ms = 0.0
        """A request that takes longer is logged as a warning; 0: none is."""
        self.api_key: ApiKey | None = None
        """The caller's; None as long as none is known, or if callers need none."""
        self.is_anonymous = False
        """Whether the request came without an API key, which its body may have."""
        self.client_address = ""
        """As `client_address` says; empty on a unix socket if no proxy tells it."""
        self.model = ""
        """Reference of the model that path and query name, or of the default one; empty if the body may name it, and for other
        routes."""
        self.share = WHOLE
        """The part of a model's limit that the request may use."""
        self.is_body_received = False
        """Whether the body has been received completely."""
        self.is_client_gone = False
        """Whether the client disconnected before its request was complete, or before its response."""
        self.is_detail_logged = True
        """Whether the log line has the `detail` of an error."""
        self.error = ""
        """The code of the error in the response; empty if there is none."""
        self.failed_stage = ""
        """The stage of a detection in which it failed."""
        self.rejection_reason = ""
        """What is used up, if the request is rejected because the gateway is full."""
        self.log_fields: dict[str, Any] = {}
        """Fields to add to the log line of the request."""


def context_of(scope: Scope) -> RequestContext:
    """Return the context of the request with this scope."""
    context: RequestContext = scope["state"]["request_context"]
    return context


def attach(context: RequestContext, scope: Scope) -> None:
    """Store the context of a request in its scope."""
    scope.setdefault("state", {})["request_context"] = context
