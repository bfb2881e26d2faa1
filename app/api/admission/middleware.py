"""The ASGI layers around Litestar, which also see requests without a matching route and the responses of error handlers.

From the outermost: context, headers, metrics and log line of every request; HEAD; CORS, if it is on (`cors`); routing and
the checks before Litestar's own.
"""

import asyncio
import random
import re
from collections.abc import Awaitable
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog
from litestar.enums import HttpMethod, ScopeType
from litestar.types import ASGIApp, HTTPScope, Message, Receive, ReceiveMessage, Scope, Send

from app.api.admission import guards
from app.api.answering import problems
from app.api.answering.problems import WriteError, with_head
from app.api.caller.check import note_key
from app.api.caller.client_address import client_address
from app.api.context import RequestContext, context_of
from app.api.dependencies import WorkerResources
from app.api.receiving.client_watch import drain, has_body
from app.api.reports.metrics import count_request
from app.api.routes import PROBES, UNMATCHED, ModelRoute, RouteTable, note_route, route_of
from app.errors import CircuitOpen, GatewayFull, MalformedRequest
from app.resilience.fairness import caller_at
from app.resilience.pacer import RejectionPacer
from app.telemetry import trace_context
from app.telemetry.timing import CACHE
from app.telemetry.trace_context import TraceContext

if TYPE_CHECKING:  # imports OpenTelemetry, which is optional
    from app.telemetry.tracing import RequestSpan, Tracing

_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_MAX_PATH = 200
_MAX_METHOD = 32
_PACED = {401, 429}  # delayed on purpose if there are many, and then not logged as slow
_CLIENT_GONE = 499
_CLOSE = [(b"connection", b"close")]
"""Headers of a worker's last answers: whoever kept the connection would lose the next request."""
_OK = 200
_INTERNAL_ERROR = 500
_UNAVAILABLE = 503

LOG = structlog.get_logger()


class RequestContextMiddleware:
    """Creates the `RequestContext` of each request. Afterwards it counts and logs the request, unless another process does."""

    def __init__(self, app: ASGIApp, resources: WorkerResources, tracing: "Tracing | None" = None) -> None:
        self.app = app
        self._resources = resources
        self._proxies = resources.deployment.trusted_proxies
        self._caller_at = lru_cache(4096)(partial(caller_at, inside=self._proxies))  # hashing networks takes long
        self._tracing = tracing
        self._rejections = RejectionPacer()

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Handle an HTTP request; pass other scopes (the lifespan) through."""
        # Each coroutine around the handler would take part in each of its waits.
        return self._handle(scope, receive, send) if scope["type"] == ScopeType.HTTP else self.app(scope, receive, send)

    async def _handle(self, scope: HTTPScope, receive: Receive, send: Send) -> None:
        headers = dict(scope["headers"])
        content_type, encoding = headers.get(b"content-type", b""), headers.get(b"content-encoding", b"")
        declared = None if b"transfer-encoding" in headers else headers.get(b"content-length")
        given = headers.get(b"x-request-id", b"").decode("latin-1")
        request_id = given if _ID.fullmatch(given) else f"{random.getrandbits(64):016x}"
        context = RequestContext(request_id, content_type.decode("latin-1"), encoding.decode("latin-1"))
        context.headers = headers
        accepted = [value for name, value in scope["headers"] if name == b"accept"] if b"accept" in headers else []
        context.accept = b", ".join(accepted)
        scope.setdefault("state", {})["request_context"] = context
        context.client_address = context.log_fields["client"] = client_address(scope, headers, self._proxies)
        context.caller = self._caller_at(context.client_address)
        metrics = self._resources.metrics
        # HeadMiddleware may change the method in the scope, and DispatchMiddleware the path.
        method, path = scope["method"][:_MAX_METHOD], _printable(scope["path"])
        context.trace = _caller(scope) if b"traceparent" in headers else None
        span = None if self._tracing is None else self._join_trace(context, scope, self._tracing)

        async def receive_and_count() -> ReceiveMessage:
            message = await receive()
            if message["type"] == "http.request":
                context.request_bytes += len(message["body"])
                # Granian tells the end of a body in a message of its own, for which the event loop would wake up once more.
                if declared == b"%d" % context.request_bytes:
                    message["more_body"] = False
            return message

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                context.status = int(message["status"])
                if context.status in _PACED and not context.is_passed_on:
                    await self._rejections.pace(context.caller, context.request_bytes)
                message["headers"] = [
                    *message["headers"],
                    *_headers(context),
                    *(_CLOSE if self._resources.closes_connections else ()),
                ]
            await send(message)
            context.response_bytes += _body_size(message)

        unsent_status = _INTERNAL_ERROR
        metrics.active_requests.add(1)
        self._resources.client_ports[context] = str((scope.get("client") or ("", 0))[1])
        try:
            await self.app(scope, receive_and_count, send_with_headers)
        except asyncio.CancelledError:
            unsent_status = _CLIENT_GONE
            raise
        finally:
            status = _CLIENT_GONE if context.is_client_gone else context.status or unsent_status
            metrics.active_requests.add(-1)
            del self._resources.client_ports[context]
            self._report(scope, method, path, context, status)
            if span is not None:
                _end(span, scope, context, status)
            context.end_answer()
        if not context.is_body_received and has_body(headers):
            await drain(receive, is_anonymous=context.is_anonymous)

    @staticmethod
    def _join_trace(context: RequestContext, scope: HTTPScope, tracing: "Tracing") -> "RequestSpan":
        span = tracing.start(context.trace, context.timing, scope["method"][:_MAX_METHOD], _printable(scope["path"]))
        context.trace = span.context
        return span

    def _report(self, scope: HTTPScope, method: str, path: str, context: RequestContext, status: int) -> None:
        if context.is_passed_on:
            return
        route, duration_ms, steps = route_of(scope), context.timing.total, context.timing.steps
        count_request(self._resources.metrics, context, route, status, duration_ms)
        fields = {
            "request_id": context.request_id,
            "method": method,
            "route": route,
            "path": path,
            "status": status,
            "duration_ms": round(duration_ms, 2),
            "request_bytes": context.request_bytes,
            "response_bytes": context.response_bytes,
            # Copied because a thread may still record a stage after a timeout.
            "stages": {stage: round(duration, 2) for stage, duration in context.timing.stages.copy().items()},
            **({"steps": {step: round(end - begin, 2) for step, (begin, end) in steps.items()}} if steps else {}),
            **context.log_fields,
        }
        if context.trace is not None:
            fields |= {"trace_id": context.trace.trace_id, "span_id": context.trace.span_id}
        log = LOG.debug if status == _OK and route in PROBES else LOG.info
        if 0 < context.slow_request_ms < duration_ms and status not in _PACED:
            fields["slow"] = True
            log = LOG.warning
        if status >= _INTERNAL_ERROR and status != _UNAVAILABLE:
            log = LOG.error
        log("request", **fields)


def _end(span: "RequestSpan", scope: HTTPScope, context: RequestContext, status: int) -> None:
    route = route_of(scope)
    attributes: dict[str, str | int] = {
        "http.request.body.size": context.request_bytes,
        "http.response.body.size": context.response_bytes,
        "nereid.request_id": context.request_id,
    }
    if "model" in context.log_fields:
        attributes["nereid.model"] = context.log_fields["model"]
    span.end(None if route == UNMATCHED else route, status, attributes)


def _headers(context: RequestContext) -> list[tuple[bytes, bytes]]:
    if context.is_passed_on:
        return []
    total = context.timing.total
    headers = [
        (b"x-request-id", context.request_id.encode()),
        (b"x-process-time", f"{total:.2f}ms".encode()),
        (b"server-timing", context.timing.server_timing(total).encode()),
    ]
    if result := context.timing.descriptions.get(CACHE):
        headers.append((b"x-cache", result.encode()))
    if context.trace is not None:
        headers.append((b"traceparent", context.trace.traceparent.encode()))
    return headers


def _body_size(message: Message) -> int:
    path: Any = message.get("path")
    return len(message.get("body", b"")) if path is None else Path(path).stat().st_size  # type: ignore[arg-type]


def _printable(path: str) -> str:
    """Truncate a path, and escape it if it contains characters that log readers may treat as line breaks."""
    path = path[:_MAX_PATH]
    return path if path.isprintable() else path.encode("ascii", "backslashreplace").decode()


def _caller(scope: HTTPScope) -> TraceContext | None:
    given = [value for name, value in scope["headers"] if name == b"traceparent"]
    state = b",".join(value for name, value in scope["headers"] if name == b"tracestate")
    return trace_context.parse(given[0].decode("latin-1"), state.decode("latin-1")) if len(given) == 1 else None


class HeadMiddleware:
    """Passes a HEAD request on as GET and drops the body of the response; Litestar would describe each route twice in OpenAPI."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Convert HEAD to GET, add HEAD to the response to OPTIONS, and pass everything else on unchanged."""
        method = scope["method"] if scope["type"] == ScopeType.HTTP else ""
        if method not in {"HEAD", "OPTIONS"}:
            return self.app(scope, receive, send)
        if method == "HEAD":
            scope["method"] = "GET"  # type: ignore[typeddict-unknown-key]

        async def send_as_asked(message: Message) -> None:
            if message["type"] == "http.response.start" and method == "OPTIONS":
                message["headers"] = [
                    (name, with_head(value.decode()).encode() if name == b"allow" else value) for name, value in message["headers"]
                ]
            elif message["type"] != "http.response.start" and method == "HEAD":
                message = {"type": "http.response.body", "body": b"", "more_body": bool(message.get("more_body"))}
            await send(message)

        return self.app(scope, receive, send_as_asked)


class DispatchMiddleware:
    """Routes the paths of dialects, and rejects what is malformed or cannot be admitted, which costs less here than in Litestar."""

    def __init__(self, app: ASGIApp, table: RouteTable, worker: WorkerResources, write_error: WriteError) -> None:
        self.app = app
        self._table = table
        self._worker = worker
        self._write_error = write_error

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        """Reject a request, or pass it on."""
        if scope["type"] == ScopeType.HTTP:
            try:
                self._check(scope)
            except (MalformedRequest, GatewayFull, CircuitOpen) as error:
                return problems.send(error, scope, send, self._write_error)
        return self.app(scope, receive, send)

    def _check(self, scope: HTTPScope) -> None:
        if len(scope["path"]) > guards.MAX_PATH or (found := self._table.find(scope)) is None:
            guards.check_framing(scope)
            return
        target, path_values = found
        scope["path"] = target.prefix + scope["path"]
        note_route(scope, target.template)
        guards.check_framing(scope)
        if isinstance(target.handler, ModelRoute) and scope["method"] == HttpMethod.POST:
            context = context_of(scope)
            context.has_model_route = True
            stream = context.headers.get(b"x-stream", b"") if target.handler.has_streams else b""
            if stream and self._worker.catalog.own(path_values.get("model", "")) is None:  # not of a cascade
                context.stream = stream.decode("latin-1")
            if self._worker.keys is not None:
                note_key(scope, target.handler, self._worker.keys)
            if self._worker.keys is None or context.scopes is not None:  # without a valid key, reveal nothing about a model
                model = guards.note_model(scope, context, target.handler, path_values, self._worker)
                guards.check_capacity(context, target.handler, model, self._worker)
            elif context.is_anonymous:
                length = int(context.headers.get(b"content-length") or b"0")
                self._worker.pipeline.admission.anonymous_uploads.check(context.client_address, length)
