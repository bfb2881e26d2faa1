"""What every exchange gets, whatever becomes of it: an id, a clock, headers and one log line.

It wraps the whole application, so that it also sees the requests that no route matched.
"""

import re
import secrets
from typing import Any

import structlog
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from app.stages import Stages

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_GONE = 499

LOG = structlog.get_logger()


class Exchange:
    """One request and its answer, carried in the scope for routes and log alike."""

    def __init__(self, request_id: str) -> None:
        self.id = request_id
        self.stages = Stages()
        self.status = 0
        self.is_gone = False
        """Whether the client hung up before its request was complete."""
        self.notes: dict[str, Any] = {}
        """For the log line: what a route wants to be known."""


def exchange(scope: Scope) -> Exchange:
    """Find the exchange of a request."""
    found: Exchange = scope["state"]["exchange"]
    return found


class Envelope:
    """Outermost ASGI application."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the exchange on and book it; what is no HTTP request (the lifespan) goes through."""
        if scope["type"] == ScopeType.HTTP:
            await self._exchange(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _exchange(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        this = Exchange(_request_id(scope))
        scope.setdefault("state", {})["exchange"] = this

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                this.status = message["status"]
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", this.id.encode()),
                    (b"x-process-time", f"{this.stages.total:.2f}ms".encode()),
                    (b"server-timing", this.stages.server_timing().encode()),
                ]
            await send(message)

        try:
            await self.app(scope, receive, send_marked)
        finally:
            status = _GONE if this.is_gone or not this.status else this.status
            level = LOG.error if status >= 500 and status != 503 else LOG.info  # noqa: PLR2004
            level(
                "request",
                request_id=this.id,
                method=scope["method"],
                path=scope["path"][:200],
                status=status,
                milliseconds=round(this.stages.total, 2),
                **this.notes,
            )


def _request_id(scope: HTTPScope) -> str:
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _ID.fullmatch(text := value.decode("latin-1")):
            return text
    return secrets.token_hex(8)
