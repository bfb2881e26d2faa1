"""The outermost ASGI layer: a request id, a clock, response headers and one log line for every request.

It wraps the whole application, so that it also sees requests that no route matches and responses of error handlers.
"""

import asyncio
import re
import secrets
from collections.abc import Mapping

import structlog
from litestar.enums import ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, Scope, Send

from app.api.context import RequestContext, attach, endpoint_of
from app.api.dependencies import WorkerResources
from app.api.drain import drain, has_body
from app.api.metrics import count

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_CLIENT_GONE = 499
_INTERNAL_ERROR = 500

LOG = structlog.get_logger()


class RequestContextMiddleware:
    """Creates the `RequestContext` of each request and logs it at the end."""

    def __init__(self, app: ASGIApp, resources: WorkerResources) -> None:
        self.app = app
        self._resources = resources

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle an HTTP request; pass anything else (the lifespan) through."""
        if scope["type"] == ScopeType.HTTP:
            await self._handle(scope, receive, send)
        else:
            await self.app(scope, receive, send)

    async def _handle(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        context = RequestContext(_request_id(headers), headers.get(b"content-type", b"").decode("latin-1"))
        attach(context, scope)
        metrics = self._resources.metrics
        metrics.active_requests.add(1)

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = int(message["status"])
                message["headers"] = [
                    *message["headers"],
                    (b"x-request-id", context.request_id.encode()),
                    (b"x-process-time", f"{context.timing.total:.2f}ms".encode()),
                    (b"server-timing", context.timing.server_timing().encode()),
                ]
            await send(message)

        unsent_status = _INTERNAL_ERROR
        try:
            await self.app(scope, receive, send_with_headers)
        except asyncio.CancelledError:
            unsent_status = _CLIENT_GONE
            raise
        finally:
            status = _CLIENT_GONE if context.is_client_gone else context.status or unsent_status
            log = LOG.error if status >= 500 and status != 503 else LOG.info  # noqa: PLR2004
            log(
                "request",
                request_id=context.request_id,
                method=scope["method"],
                path=_printable(scope["path"][:200]),
                status=status,
                duration_ms=round(context.timing.total, 2),
                **context.log_fields,
            )
            metrics.active_requests.add(-1)
            count(metrics, context, endpoint_of(scope), status)
        if not context.is_body_received and has_body(headers):
            await drain(receive)


def _printable(path: str) -> str:
    """Escape a path with characters that some readers of logs take for line breaks."""
    return path if path.isprintable() else path.encode("ascii", "backslashreplace").decode()


def _request_id(headers: Mapping[bytes, bytes]) -> str:
    """Return the caller's request id if it is well formed, else a new one."""
    given = headers.get(b"x-request-id", b"").decode("latin-1")
    return given if _ID.fullmatch(given) else secrets.token_hex(8)
