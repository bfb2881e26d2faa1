"""Spans of requests, as a receiver of OpenTelemetry gets them, the stopwatch of a request, the headers of a trace; and metrics."""

import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from app import feature
from app.resilience.worker_table import COUNTER, GAUGE, WorkerTable
from app.telemetry import tracing
from app.telemetry.instruments import CommonGauge, Counter, Gauge, Histogram, WorkerGauge, read_names
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing
from app.telemetry.trace_context import TraceContext, parse
from app.telemetry.tracing import Tracing
from tests.fakes.otlp import Receiver, attributes_of, receiving_traces
from tests.support import ROOT, OpenTable

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


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


async def test_trace_that_the_caller_does_not_sample_is_continued_and_not_exported(receiver: Receiver) -> None:
    """So that callees do not sample it either."""
    context = await trace(TraceContext(TRACE, SPAN, 0), stages=("read",))
    assert receiver.requests == []
    assert context
    assert (context.trace_id, context.flags, context.span_id != SPAN) == (TRACE, 0, True)


async def test_names_and_errors_are_those_of_the_conventions(receiver: Receiver) -> None:
    """Names have low cardinality: no path, no method that a caller has made up. What a client has done is no error."""
    for method, route, status, name, error in (
        ("GET", "/livez", 499, "GET /livez", None),
        ("GET", "/livez", 500, "GET /livez", "500"),
        ("GET", None, 404, "GET", None),
        ("FROBNICATE", "/livez", 405, "HTTP /livez", None),
    ):
        receiver.requests.clear()
        await trace(method=method, route=route, status=status)
        (span,) = receiver.spans
        attributes = attributes_of(span)
        assert (span.name, attributes.get("http.route"), attributes["http.response.status_code"]) == (name, route, status)
        assert (span.status.code == Status.STATUS_CODE_ERROR, attributes.get("error.type")) == (error is not None, error)
        assert attributes.get("http.request.method_original", attributes["http.request.method"]) == method
        assert attributes["http.request.method"] in {"GET", "_OTHER"}


async def test_variables_of_opentelemetry_choose_the_exporter(receiver: Receiver, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("OTEL_EXPORTER_OTLP_PROTOCOL", "grpc"), ("OTEL_TRACES_EXPORTER", "console")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            with pytest.raises(ValueError, match=f"{name}={value} is not supported"):
                Tracing()
    monkeypatch.setenv("OTEL_TRACES_EXPORTER", "none")
    await trace()
    assert receiver.requests == []


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


def test_tracing_and_features_that_are_off_are_not_imported() -> None:
    """It costs time and memory and need not be installed. Litestar checks whether OpenTelemetry is."""
    program = "import sys; from app.main import create_app; create_app(); print(*sys.modules)"
    output = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    modules = set(output.split())
    assert not {"opentelemetry.sdk", "requests"} & modules
    assert {name for name in modules if name.startswith("app.features.") and name.count(".") > 2} == {
        f"app.features.{name}.settings" for name in feature.NAMES
    }


def test_stages_are_the_times_between_laps_of_which_the_last_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.telemetry.timing.perf_counter", iter([10.0, 10.25, 10.5, 10.75, 12.0, 12.5, 15.0]).__next__)
    timing = Timing()
    timing.lap("decode")
    timing.lap("read")
    timing.start_lap()
    timing.lap("decode")
    timing.lap("infer")
    assert timing.intervals() == [("decode", 750.0, 2000.0), ("read", 250.0, 500.0), ("infer", 2000.0, 2500.0)]
    assert timing.server_timing(timing.total) == "decode;dur=1250.00, read;dur=250.00, infer;dur=500.00, total;dur=5000.00"


def test_stages_may_be_recorded_while_intervals_are_read() -> None:
    """A decoding thread may still record a stage of a request that has timed out."""
    timing = Timing()

    def record() -> None:
        for index in range(20_000):
            timing.lap(f"stage {index}")

    recording = threading.Thread(target=record)
    recording.start()
    while recording.is_alive():
        assert all(begin <= end for _, begin, end in timing.intervals())
    assert len(timing.intervals()) == 20_000


def test_header_is_passed_on_without_unknown_flags_and_fields() -> None:
    for version, given, known in (("00", "ff", "03"), ("00", "08", "00"), ("cc", "01-what the future will be like", "01")):
        context = parse(f"{version}-{TRACE}-{SPAN}-{given}")
        assert context == TraceContext(TRACE, SPAN, int(known, 16))
        assert context.traceparent == f"00-{TRACE}-{SPAN}-{known}"
        assert context.is_sampled is (known in {"01", "03"})


def test_a_malformed_header_is_none() -> None:
    for header in (
        *("", "x" * 100_000, f"00-{TRACE}-{SPAN}-01, 00-{TRACE}-{SPAN}-01"),
        *(f"00-{TRACE}-{SPAN}{flags}" for flags in ("", "-1", "-0g", "-01-more", "-01\n")),
        *(f"00-{trace}-{SPAN}-01" for trace in (TRACE.upper(), "0" * 32, chr(0x660) * 32)),
        *(f"ff-{TRACE}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"cc-{TRACE}-{SPAN}-01.more"),
    ):
        assert parse(header) is None


def test_the_state_is_passed_on_if_it_can_be_a_header() -> None:
    """Without the state the trace is still valid."""
    for state, passed_on in (("a=1,b=x y", True), ("x" * 513, False), ("a=\n", False), ("ä=1", False)):
        context = parse(f"00-{TRACE}-{SPAN}-01", state)
        assert context is not None
        assert [value for name, value in context.headers if name == "tracestate"] == [state] * passed_on


@pytest.fixture
def tables(open_table: OpenTable) -> list[WorkerTable]:
    return [open_table(), open_table()]


def samples(table: WorkerTable, instrument: Counter | Histogram | Gauge) -> dict[str, float]:
    """Return the samples of a metric, by name and labels as Prometheus writes them."""
    family = instrument.collect(read_names(table.keys(GAUGE if isinstance(instrument, Gauge) else COUNTER)))
    return {
        sample.name + "".join(f",{name}={value}" for name, value in sorted(sample.labels.items())): sample.value
        for sample in family.samples
    }


def test_events_of_all_workers_count_and_known_labels_are_shown_before(tables: list[WorkerTable]) -> None:
    """The first event is then visible as an increase; counters without labels are shown as well."""
    first, second = (Counter(table, "events", "Events.", ["kind"], ["a", "x"]) for table in tables)
    assert samples(tables[0], first) == {"events_total,kind=a": 0, "events_total,kind=x": 0}
    first.add(1, "a")
    second.add(2, "a")
    second.add(1, "")
    expected = {"events_total,kind=a": 3, "events_total,kind=x": 0, "events_total,kind=": 1}
    assert samples(tables[0], first) == samples(tables[0], second) == expected
    assert samples(tables[0], Counter(tables[0], "b", "B.")) == {"b_total": 0}


def test_durations_of_all_workers_count_in_their_bucket_and_all_larger_ones(tables: list[WorkerTable]) -> None:
    """Prometheus' buckets are cumulative."""
    histograms = [Histogram(table, "took_seconds", "Took.", ["what"], [0.1, 1.0]) for table in tables]
    expected, found = {"0.1": 0, "1.0": 0, "+Inf": 0}, dict[str, float]()
    for count, (seconds, buckets) in enumerate([(0.1, 3), (0.11, 2), (1.0, 2), (1.5, 1)], 1):
        histograms[count % 2].observe(seconds, "x")
        for bound in list(expected)[3 - buckets :]:
            expected[bound] += 1
        found = samples(tables[0], histograms[0])
        assert {bound: found[f"took_seconds_bucket,le={bound},what=x"] for bound in expected} == expected
        assert found["took_seconds_count,what=x"] == count
    assert found["took_seconds_sum,what=x"] == pytest.approx(2.71)


def test_gauges_are_added_up_unless_they_are_common_or_of_interest_for_each_worker(tables: list[WorkerTable]) -> None:
    for number, table in enumerate(tables, start=1):
        Gauge(table, "active", "Active.", ["model"]).set(number, "x")
        CommonGauge(table, "limit", "Limit.", ["model"]).set(10 * number, "x")
        WorkerGauge(table, "memory_bytes", "Memory.").set(100 * number)
    assert samples(tables[0], Gauge(tables[0], "active", "Active.", ["model"])) == {"active,model=x": 3}
    assert samples(tables[0], CommonGauge(tables[0], "limit", "Limit.", ["model"])) == {"limit,model=x": 20}
    memory = samples(tables[0], WorkerGauge(tables[1], "memory_bytes", "Memory."))
    assert memory == {"memory_bytes,worker=1": 100, "memory_bytes,worker=2": 200}


def test_few_classes_of_a_pair_of_models_and_of_many_pairs_have_a_label(open_table: OpenTable) -> None:
    """Each new version of a model makes a pair."""
    first, second = (Metrics(open_table(), "0") for _ in range(2))
    labels = []
    for number in range(600):
        pair = "door", "b:1", f"a:{number // 50}"
        labels.append(first.class_label(*pair, f"class {number}"))
        first.shadow_boxes.add(1, *pair, labels[-1], "matched")
        if number == 49:
            assert [second.class_label(*pair, name) for name in ("class 7", "more")] == ["class 7", "other"]
            assert second.class_label("door", "b:2", "a:0", "more") == "more"
    assert (labels[499], labels[500], labels[-1]) == ("class 499", "other", "other")
