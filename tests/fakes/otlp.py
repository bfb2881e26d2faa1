"""A receiver of OpenTelemetry traces, as a collector is one: OTLP over HTTP."""

import re
import threading
from base64 import b64encode
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import ThreadingHTTPServer
from typing import Any

from google.protobuf import json_format
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from tests.fakes.http import Handler


class Receiver(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.url = f"http://127.0.0.1:{self.server_address[1]}"
        """What `OTEL_EXPORTER_OTLP_ENDPOINT` has to be."""
        self.requests: list[ExportTraceServiceRequest] = []
        self.paths: list[str] = []
        self.status = 200
        self.may_answer = threading.Event()
        self.may_answer.set()

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for part in request.resource_spans
            for scope in part.scope_spans
            for span in scope.spans
        ]

    @property
    def services(self) -> dict[str, dict[str, Any]]:
        """The attributes of each resource that has exported something, by its service name."""
        resources = [attributes_of(part.resource) for request in self.requests for part in request.resource_spans]
        return {resource["service.name"]: resource for resource in resources}

    def of_trace(self, trace_id: str) -> dict[str, Span]:
        """Return the spans of a trace by name."""
        return {span.name: span for span in self.spans if span.trace_id.hex() == trace_id}

    def named(self, name: str) -> Span:
        (span,) = [span for span in self.spans if span.name == name]
        return span

    def children(self, parent: Span) -> list[Span]:
        return sorted(
            (span for span in self.spans if span.parent_span_id == parent.span_id), key=lambda span: span.start_time_unix_nano
        )


class _Handler(Handler):
    server: Receiver

    def do_POST(self) -> None:  # noqa: N802
        body = self.rfile.read(int(self.headers["Content-Length"]))
        request = (
            _from_json(body) if self.headers["Content-Type"] == "application/json" else ExportTraceServiceRequest.FromString(body)
        )
        self.server.may_answer.wait()
        self.server.paths.append(self.path)
        self.server.requests.append(request)
        self.answer(b"", self.server.status, self.headers["Content-Type"])  # so protobuf writes that everything was accepted


def _from_json(body: bytes) -> ExportTraceServiceRequest:
    """Parse OTLP's JSON, in which ids are hexadecimal and not base64 as protobuf has them."""
    ids = rb'(?P<name>"(?:traceId|spanId|parentSpanId)"\s*:\s*")(?P<id>[0-9a-f]*)'
    text = re.sub(ids, lambda found: found["name"] + b64encode(bytes.fromhex(found["id"].decode())), body)
    request = ExportTraceServiceRequest()
    json_format.Parse(text, request, ignore_unknown_fields=True)
    return request


def attributes_of(thing: Any) -> dict[str, Any]:  # noqa: ANN401 - a span or a resource
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in thing.attributes}


@contextmanager
def receiving_traces() -> Iterator[Receiver]:
    with Receiver() as receiver:
        thread = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield receiver
        finally:
            receiver.may_answer.set()
            receiver.shutdown()
            thread.join()
