"""OpenTelemetry: spans of requests and their stages, exported with OTLP over HTTP.

Imported only if tracing is on. OpenTelemetry's variables `OTEL_*` set endpoint, sampler, service name and batching. A thread
exports the spans; spans that it cannot export in time are dropped.
"""

import asyncio
import os
import threading
import time
from collections.abc import Mapping

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import (
    NonRecordingSpan,
    SpanContext,
    SpanKind,
    StatusCode,
    TraceFlags,
    Tracer,
    TraceState,
    set_span_in_context,
)

from app import __version__
from app.telemetry.timing import Timing
from app.telemetry.trace_context import TraceContext

_FLUSH_SECONDS = 3.0
_PROTOCOL = "http/protobuf"
_FIRST_SERVER_ERROR = 500
# Other methods are recorded as `_OTHER`, because callers can invent them.
_METHODS = {"CONNECT", "DELETE", "GET", "HEAD", "OPTIONS", "PATCH", "POST", "PUT", "QUERY", "TRACE"}


class RequestSpan:
    """The span of one request. The spans of its stages are created when it ends, from the recorded timing."""

    def __init__(self, tracer: Tracer, parent: TraceContext | None, timing: Timing, method: str, path: str) -> None:
        """Start the span. The sampler of `tracer` decides whether it is exported; `path` is printable."""
        self._tracer = tracer
        self._timing = timing
        self._start_ns = time.time_ns() - round(timing.total * 1e6)
        attributes = {"http.request.method": method, "url.path": path, "url.scheme": "http"}
        if method not in _METHODS:
            attributes |= {"http.request.method": "_OTHER", "http.request.method_original": method}
        self._name = method if method in _METHODS else "HTTP"
        self._span = tracer.start_span(self._name, _to_context(parent), SpanKind.SERVER, attributes, start_time=self._start_ns)

    @property
    def context(self) -> TraceContext | None:
        """The span as a parent of others; None if OpenTelemetry is disabled."""
        context = self._span.get_span_context()
        if not context.is_valid:
            return None
        state = context.trace_state.to_header()
        return TraceContext(f"{context.trace_id:032x}", f"{context.span_id:016x}", context.trace_flags, state)

    def end(self, route: str | None, status: int, attributes: Mapping[str, str | int]) -> None:
        """End the span. `route` is the template of the request's path; None if no route matched."""
        span = self._span
        if not span.is_recording():
            return
        if route is not None:
            span.update_name(f"{self._name} {route}")
            span.set_attribute("http.route", route)
        span.set_attributes({"http.response.status_code": status, **attributes})
        if status >= _FIRST_SERVER_ERROR:
            span.set_attribute("error.type", str(status))
            span.set_status(StatusCode.ERROR)
        parent = set_span_in_context(span, Context())
        for stage, begin, end in self._timing.intervals():
            self._tracer.start_span(stage, parent, start_time=self._at(begin)).end(self._at(end))
        span.end(self._at(self._timing.total))

    def _at(self, milliseconds: float) -> int:
        """Convert a time since the request's start to OpenTelemetry's format, nanoseconds since 1970."""
        return self._start_ns + round(milliseconds * 1e6)


class Tracing:
    """Creates and exports the spans of one worker."""

    def __init__(self) -> None:
        ours = Resource({"service.name": "nereid", "service.version": __version__})
        resource = Resource.create().merge(ours).merge(OTELResourceDetector().detect())
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        if (exporter := _exporter()) is not None:
            self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("nereid", __version__)

    def start(self, parent: TraceContext | None, timing: Timing, method: str, path: str) -> RequestSpan:
        """Start the span of a request; arguments as for `RequestSpan`."""
        return RequestSpan(self._tracer, parent, timing, method, path)

    async def close(self) -> None:
        """Export the remaining spans, for up to three seconds."""
        # OpenTelemetry's own limit is 30 s.
        closing = threading.Thread(target=self._provider.shutdown, daemon=True)
        closing.start()
        await asyncio.to_thread(closing.join, _FLUSH_SECONDS)


def _exporter() -> OTLPSpanExporter | None:
    """Make the exporter that OpenTelemetry's variables name, if any; raise ValueError for one that is not OTLP over HTTP."""
    name = os.environ.get("OTEL_TRACES_EXPORTER") or "otlp"
    variable = "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL"
    if not os.environ.get(variable):
        variable = "OTEL_EXPORTER_OTLP_PROTOCOL"
    protocol = os.environ.get(variable) or _PROTOCOL
    if name not in {"otlp", "none"}:
        raise ValueError(f"OTEL_TRACES_EXPORTER={name} is not supported; unset it, or set it to otlp or none")
    if protocol != _PROTOCOL:
        raise ValueError(f"{variable}={protocol} is not supported; set it to {_PROTOCOL}, for which collectors listen on port 4318")
    return OTLPSpanExporter() if name == "otlp" else None


def _to_context(parent: TraceContext | None) -> Context:
    if parent is None:
        return Context()
    ids = int(parent.trace_id, 16), int(parent.span_id, 16)
    flags, state = TraceFlags(parent.flags), TraceState.from_header([parent.state])
    return set_span_in_context(NonRecordingSpan(SpanContext(*ids, is_remote=True, trace_flags=flags, trace_state=state)), Context())


if __name__ == "__main__":  # checks the settings
    Tracing()
