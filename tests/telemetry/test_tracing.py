"""Spans of requests, as a receiver of OpenTelemetry gets them."""

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from app import __version__
from app.telemetry import tracing
from app.telemetry.timing import Timing
from app.telemetry.trace_context import TraceContext
from app.telemetry.tracing import Tracing
from tests.fakes.otlp import Receiver, attributes_of, receiving_traces
from tests.support import ROOT

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
SAMPLED, NOT_SAMPLED = TraceContext(TRACE, SPAN, 1), TraceContext(TRACE, SPAN, 0)


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Receiver]:
    """A receiver, to which everything is exported that is opened from now on."""
    with receiving_traces() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        yield receiver


async def trace(
    parent: TraceContext | None = None,
    method: str = "GET",
    route: str | None = "/livez",
    status: int = 200,
    stages: tuple[str, ...] = (),
) -> TraceContext | None:
    """Trace one request, export what there is, and return its place in the trace."""
    tracing, timing = Tracing(), Timing()
    span = tracing.start(parent, timing, method, "/the/path")
    for stage in stages:
        timing.lap(stage)
    span.end(route, status, {"nereid.model": "tiny", "http.request.body.size": 7})
    await tracing.close()
    return span.context


async def test_a_request_is_a_span_of_the_server_with_its_stages_below(receiver: Receiver) -> None:
    before = time.time_ns()
    context = await trace(method="POST", route="/predict/{model}", stages=("read", "infer"))
    after = time.time_ns()

    assert receiver.paths == ["/v1/traces"]
    request = receiver.named("POST /predict/{model}")
    assert (request.kind, request.parent_span_id) == (Span.SPAN_KIND_SERVER, b"")
    assert context
    assert (request.trace_id.hex(), request.span_id.hex(), context.flags & 1) == (context.trace_id, context.span_id, 1)
    assert attributes_of(request) == {
        "http.request.method": "POST",
        "url.path": "/the/path",
        "url.scheme": "http",
        "http.route": "/predict/{model}",
        "http.response.status_code": 200,
        "nereid.model": "tiny",
        "http.request.body.size": 7,
    }
    stages = receiver.children(request)
    assert [(stage.name, stage.kind) for stage in stages] == [(name, Span.SPAN_KIND_INTERNAL) for name in ("read", "infer")]
    assert {stage.trace_id for stage in stages} == {request.trace_id}
    times = [moment for stage in stages for moment in (stage.start_time_unix_nano, stage.end_time_unix_nano)]
    order = [before, request.start_time_unix_nano, *times, request.end_time_unix_nano, after]
    assert order == sorted(order)


async def test_a_trace_of_the_caller_is_continued_and_exported_if_the_caller_samples_it(receiver: Receiver) -> None:
    """Otherwise it is continued all the same, so that callees do not sample it either."""
    context = await trace(NOT_SAMPLED, stages=("read",))
    assert receiver.requests == []
    assert context
    assert (context.trace_id, context.flags, context.span_id != SPAN) == (TRACE, 0, True)

    context = await trace(SAMPLED, stages=("read",))
    assert context
    assert (context.trace_id, context.flags) == (TRACE, 1)
    assert receiver.named("GET /livez").parent_span_id.hex() == SPAN
    assert {span.trace_id.hex() for span in receiver.spans} == {TRACE}


@pytest.mark.parametrize(
    ("method", "route", "status", "name", "error"),
    [
        ("GET", "/livez", 499, "GET /livez", None),
        ("GET", "/livez", 500, "GET /livez", "500"),
        ("GET", None, 404, "GET", None),
        ("FROBNICATE", "/livez", 405, "HTTP /livez", None),
    ],
)
async def test_names_and_errors_are_those_of_the_conventions(  # noqa: PLR0913, PLR0917 - a table
    receiver: Receiver, method: str, route: str | None, status: int, name: str, error: str | None
) -> None:
    """Names have low cardinality: no path, no method that a caller has made up. What a client has done is no error."""
    await trace(method=method, route=route, status=status)

    (span,) = receiver.spans
    attributes = attributes_of(span)
    assert (span.name, attributes.get("http.route"), attributes["http.response.status_code"]) == (name, route, status)
    assert (span.status.code == Status.STATUS_CODE_ERROR, attributes.get("error.type")) == (error is not None, error)
    assert attributes.get("http.request.method_original", attributes["http.request.method"]) == method
    assert attributes["http.request.method"] in {"GET", "_OTHER"}


@pytest.mark.parametrize(
    ("variable", "value", "name"),
    [
        ("OTEL_SERVICE_NAME", "", "nereid"),
        ("OTEL_SERVICE_NAME", "eyes", "eyes"),
        ("OTEL_RESOURCE_ATTRIBUTES", "service.name=eyes,a=b", "eyes"),
    ],
)
async def test_the_service_has_a_name_that_can_be_set(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, name: str
) -> None:
    monkeypatch.setenv(variable, value)
    await trace()

    assert list(receiver.services) == [name]
    assert receiver.services[name]["service.version"] == __version__


async def test_opentelemetry_can_be_disabled(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")

    assert await trace(stages=("read",)) is None
    assert receiver.requests == []


async def test_sampler_of_the_environment_decides_only_where_no_caller_has(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "parentbased_always_off")
    alone = await trace()
    await trace(SAMPLED)

    assert alone
    assert not alone.flags & 1
    assert [span.trace_id.hex() for span in receiver.spans] == [TRACE]


async def test_a_receiver_that_hangs_or_refuses_harms_nobody(
    receiver: Receiver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "0.2")
    receiver.status = 503
    assert await trace()
    assert "Failed to export spans batch" in caplog.text
    monkeypatch.setattr(tracing, "_FLUSH_SECONDS", 0.2)
    receiver.may_answer.clear()
    receiver.requests.clear()
    await trace()
    assert receiver.requests == []


def test_without_tracing_opentelemetry_is_not_imported() -> None:
    """It costs time and memory and need not be installed. Litestar checks whether it is."""
    program = (
        "import sys; from app.main import create_app; create_app(); print({'opentelemetry.sdk', 'requests'} & set(sys.modules))"
    )
    ran = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    assert ran.stdout == "set()\n"
