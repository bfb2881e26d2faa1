"""What is known of one request while it is handled, carried in the ASGI scope."""

from typing import Any

from litestar.types import Scope

from app.telemetry.timing import Timing


class RequestContext:
    """One request and its response, for routes, error handlers and the log line alike."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self.timing = Timing()
        self.status = 0
        """Of the response; 0 until it is sent."""
        self.is_client_gone = False
        """Whether the client disconnected before its request was complete."""
        self.log_fields: dict[str, Any] = {}
        """Added to the log line of the request."""


def context_of(scope: Scope) -> RequestContext:
    """Return the context of the request with this scope."""
    context: RequestContext = scope["state"]["request_context"]
    return context


def attach(context: RequestContext, scope: Scope) -> None:
    """Make it the context of the request with this scope."""
    scope.setdefault("state", {})["request_context"] = context
