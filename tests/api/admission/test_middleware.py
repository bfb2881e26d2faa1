"""Every request gets an id, a clock, response headers and one log line, whatever becomes of it."""

import asyncio
import re
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar.enums import ScopeType
from litestar.routes import HTTPRoute
from litestar.types import Receive, Scope, Send
from structlog.testing import CapturedCall

from app.api.admission import middleware
from app.api.admission.middleware import HeadMiddleware, RequestContextMiddleware
from app.api.context import context_of
from app.main import create_app
from tests.api.conftest import routes_of, settings_for
from tests.support import RESOURCES, call, captured_log, chunk, receiving, staying

Log = list[CapturedCall]

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return captured_log(monkeypatch, middleware)


async def ignore(_: Any) -> None:  # noqa: ANN401
    ...


async def start(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"x-own", b"1")]})


async def respond(send: Send, status: int) -> None:
    await start(send, status)
    await send({"type": "http.response.body", "body": b"done", "more_body": False})


def responding(status: int) -> RequestContextMiddleware:
    async def app(_: Scope, __: Receive, send: Send) -> None:
        await respond(send, status)

    return RequestContextMiddleware(app, RESOURCES)


async def test_a_response_gets_its_headers(log: Log) -> None:
    reply = await call(responding(200), receiving())

    assert (reply.status, reply.body, reply.headers["x-own"]) == (200, b"done", "1")
    assert re.fullmatch(r"[0-9a-f]{16}", reply.headers["x-request-id"])
    assert re.fullmatch(r"[0-9]+\.[0-9]{2}ms", reply.headers["x-process-time"])
    assert re.fullmatch(r"total;dur=[0-9]+\.[0-9]{2}", reply.headers["server-timing"])
    assert log[0].kwargs["request_id"] == reply.headers["x-request-id"]


@pytest.mark.parametrize("given", [["abc-1.2_Z"], ["x"], ["x" * 64], ["first", "last"]])
async def test_a_well_formed_request_id_is_kept(log: Log, given: list[str]) -> None:
    reply = await call(responding(200), receiving(), headers=[("X-Request-ID", id_) for id_ in given])

    assert reply.headers["x-request-id"] == log[0].kwargs["request_id"] == given[-1]


async def test_any_other_request_id_is_replaced(log: Log) -> None:
    """Other ids would need escaping wherever they are shown."""
    for given in ("", "a b", "x" * 65, "a\n", "ä", "a;b", "<script>"):
        reply = await call(responding(200), receiving(), headers=[("X-Request-ID", "first"), ("X-Request-ID", given)])
        assert reply.headers["x-request-id"] == log[-1].kwargs["request_id"] not in {"first", given}

    assert len({line.kwargs["request_id"] for line in log}) == len(log)


async def test_several_accept_headers_are_one() -> None:
    """A list may be spread over several lines (RFC 9110, 5.3)."""
    seen: list[bytes] = []

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        seen.append(context_of(scope).accept)
        await respond(send, 200)

    wrapped = RequestContextMiddleware(app, RESOURCES)
    for headers in ([("Accept", "image/png"), ("Accept", "text/html;q=0.5")], [("Accept", "*/*")], []):
        await call(wrapped, receiving(), headers=headers)

    assert seen == [b"image/png, text/html;q=0.5", b"*/*", b""]


@pytest.mark.parametrize(
    ("headers", "received"),
    [({"Content-Length": "6"}, b"abcdef"), ({}, b"abcdef!"), ({"Content-Length": "6", "Transfer-Encoding": "chunked"}, b"abcdef!")],
)
async def test_a_body_of_declared_length_ends_with_its_last_byte(headers: dict[str, str], received: bytes) -> None:
    parts: list[bytes] = []

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        while True:
            message: Any = await receive()
            parts.append(message["body"])
            if not message["more_body"]:
                break
        await respond(send, 200)

    client = staying(*(chunk(part, more=part != b"!") for part in (b"abc", b"def", b"!")))
    await call(RequestContextMiddleware(app, RESOURCES), client, headers=headers)

    assert b"".join(parts) == received


async def test_the_log_line_describes_the_request(log: Log) -> None:
    async def app(scope: Scope, _: Receive, send: Send) -> None:
        scope["path_template"] = "/predict/{model}"  # as Litestar does
        context_of(scope).log_fields |= {"model": "tiny", "detections": 3}
        await respond(send, 200)

    await call(RequestContextMiddleware(app, RESOURCES), receiving(), "/predict/tiny?classes=secret")

    (line,) = log
    fields = dict(line.kwargs)
    assert line.args == ("request",)
    assert fields.pop("duration_ms") >= 0
    assert fields.pop("request_id")
    assert fields == {
        "method": "POST",
        "route": "/predict/{model}",
        "path": "/predict/tiny",
        "status": 200,
        "request_bytes": 0,
        "response_bytes": 4,
        "stages": {},
        "client": "127.0.0.1",
        "model": "tiny",
        "detections": 3,
    }


async def test_the_log_line_has_the_method_and_the_route_of_the_caller(log: Log) -> None:
    async def app(scope: Scope, _: Receive, send: Send) -> None:
        scope["method"] = "GET"  # type: ignore[typeddict-unknown-key]
        await respond(send, 404)

    scope: Any = {"type": "http", "method": "HEAD", "path": "/nowhere", "headers": []}
    await RequestContextMiddleware(app, RESOURCES)(scope, receiving(), ignore)

    assert (log[0].kwargs["method"], log[0].kwargs["route"]) == ("HEAD", "unmatched")


async def test_the_sizes_are_those_that_were_transferred(log: Log, tmp_path: Path) -> None:
    (path := tmp_path / "file").write_bytes(bytes(1000))

    async def app(_: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        await start(send, 200)
        await send({"type": "http.response.body", "body": b"four", "more_body": True})
        await send({"type": "http.response.pathsend", "path": str(path)})  # type: ignore[arg-type]

    parts: list[Any] = [{"type": "http.request", "body": bytes(size), "more_body": size == 300} for size in (300, 20)]
    scope: Any = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"9999")]}
    await RequestContextMiddleware(app, RESOURCES)(scope, receiving(*parts), ignore)

    assert (log[0].kwargs["request_bytes"], log[0].kwargs["response_bytes"]) == (320, 1004)


async def test_a_long_path_is_cut_in_the_log(log: Log) -> None:
    await call(responding(404), receiving(), "/" + "x" * 5000)

    assert log[0].kwargs["path"] == "/" + "x" * 199


@pytest.mark.parametrize(
    ("response", "is_gone", "error", "level", "status"),
    [
        *[(status, False, None, "info", status) for status in (200, 304, 404, 422, 429)],
        (503, False, None, "info", 503),  # while Triton restarts, there may be thousands of them
        *[(status, False, None, "error", status) for status in (500, 502, 504)],
        (0, False, ZeroDivisionError, "error", 500),  # which the server sends, and the middleware does not see
        (200, False, ZeroDivisionError, "info", 200),
        (0, False, asyncio.CancelledError, "info", 499),  # by the server, when the client has disconnected
        (400, True, None, "info", 499),
    ],
)
async def test_the_end_of_a_request_is_logged(  # noqa: PLR0913 - a table
    log: Log, response: int, error: type[BaseException] | None, level: str, status: int, *, is_gone: bool
) -> None:
    sent: list[Any] = []

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        context_of(scope).is_client_gone = is_gone
        if response:
            await respond(send, response)
        if error:
            raise error

    async def send(message: Any) -> None:  # noqa: ANN401
        sent.append(message)

    scope: Any = {"type": "http", "method": "POST", "path": "/", "headers": []}
    with pytest.raises(error) if error else nullcontext():
        await RequestContextMiddleware(app, RESOURCES)(scope, receiving(), send)

    assert [message["type"] for message in sent] == ["http.response.start", "http.response.body"] * bool(response)
    assert [(line.method_name, line.kwargs["status"]) for line in log] == [(level, status)]


@pytest.mark.parametrize(
    ("slow_ms", "status", "level", "is_slow"),
    [
        (1e-6, 200, "warning", True),
        (1e-6, 404, "warning", True),
        (1e-6, 500, "error", True),
        (1e-6, 429, "info", False),
        (1e6, 200, "info", False),
        (0, 200, "info", False),
    ],
)
async def test_a_slow_request_is_a_warning(log: Log, slow_ms: float, status: int, level: str, *, is_slow: bool) -> None:
    async def app(scope: Scope, _: Receive, send: Send) -> None:
        context_of(scope).slow_request_ms = slow_ms
        await respond(send, status)

    await call(RequestContextMiddleware(app, RESOURCES), receiving())

    assert [(line.method_name, line.kwargs.get("slow", False)) for line in log] == [(level, is_slow)]


@pytest.mark.parametrize("flags", ["00", "01"])
async def test_a_trace_of_the_caller_is_continued(log: Log, flags: str) -> None:
    """Without tracing here, the caller's own span goes on to Triton: no span is missing then."""
    seen: list[tuple[str, str]] = []

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        trace = context_of(scope).trace
        seen.extend(trace.headers if trace else ())
        await respond(send, 200)

    parent = f"00-{TRACE}-{SPAN}-{flags}"
    headers = [("traceparent", parent), ("tracestate", "a=1"), ("tracestate", "b=2")]
    reply = await call(RequestContextMiddleware(app, RESOURCES), receiving(), headers=headers)

    assert (log[0].kwargs["trace_id"], log[0].kwargs["span_id"]) == (TRACE, SPAN)
    assert reply.headers["traceparent"] == parent
    assert seen == [("traceparent", parent), ("tracestate", "a=1,b=2")]


BODY = [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.request", "body": b"y", "more_body": False}]


@pytest.mark.parametrize(
    ("headers", "is_received", "left"),
    [
        ({"Content-Length": "2"}, False, 0),
        ({"Transfer-Encoding": "chunked"}, False, 0),
        ({"Content-Length": "2"}, True, 2),
        ({}, False, 2),
    ],
    ids=["by length", "chunked", "received", "no body"],
)
async def test_the_rest_of_a_body_is_received_after_an_early_response(
    headers: dict[str, str], left: int, *, is_received: bool
) -> None:
    """A client that still sends would otherwise see a broken connection."""
    messages = list(BODY)
    answered: list[int] = []

    async def receive() -> Any:  # noqa: ANN401
        answered.append(len(messages))
        return messages.pop(0)

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        context_of(scope).is_body_received = is_received
        await respond(send, 401)
        assert answered == []

    reply = await call(RequestContextMiddleware(app, RESOURCES), receive, headers=headers)

    assert reply.status == 401
    assert len(messages) == left


_VALUES = {"model": "a", "name": "swagger_style.css", "path": "nothing"}
"""What the routes' paths may contain."""
_OF_EACH_RESPONSE = {"x-request-id", "x-process-time", "server-timing"}


@pytest.mark.parametrize("ending", [None, RuntimeError, asyncio.CancelledError])
async def test_work_after_the_answer_begins_once_however_the_request_ends(ending: type[BaseException] | None) -> None:
    order: list[str] = []

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        context_of(scope).after_answer.append(lambda: order.append("begun"))
        await respond(send, 200)
        order.append("sent")
        if ending is not None:
            raise ending

    with nullcontext() if ending is None else pytest.raises(ending):
        await call(RequestContextMiddleware(app, RESOURCES), receiving())

    assert order == ["sent", "begun"]


def _get_paths() -> Iterator[str]:
    for route in routes_of(create_app(settings_for("127.0.0.1:1"))):
        # What says that search is off says so by whatever method.
        if isinstance(route, HTTPRoute) and "GET" in route.methods and "DELETE" not in route.methods:
            yield re.sub(r"{(\w+)}", lambda found: _VALUES[found[1]], route.path_format)


GET_PATHS = sorted(_get_paths())


def headers_of(response: httpx.Response) -> dict[str, str]:
    return {name: value for name, value in response.headers.items() if name not in _OF_EACH_RESPONSE}


@pytest.mark.parametrize("path", [*GET_PATHS, "/docs-assets/nothing", "/nowhere"])
async def test_head_is_get_without_the_body(reader: httpx.AsyncClient, path: str) -> None:
    got, asked = await reader.get(path), await reader.head(path)

    assert asked.status_code == got.status_code
    assert asked.content == b""
    assert headers_of(asked).keys() == headers_of(got).keys()
    assert set(asked.headers) >= _OF_EACH_RESPONSE
    if path.removeprefix("/v1") not in {"/health", "/metrics", "/ready"}:  # which tell something else each time
        assert headers_of(asked) == headers_of(got)
        assert int(asked.headers["content-length"]) == len(got.content) > 0


@pytest.mark.parametrize("path", GET_PATHS)
async def test_the_allowed_methods_are_told(reader: httpx.AsyncClient, path: str) -> None:
    for response, status in ((await reader.options(path), 204), (await reader.put(path), 405)):
        assert response.status_code == status
        assert sorted({*response.headers["allow"].split(", ")} - {"POST"}) == ["GET", "HEAD", "OPTIONS"]


@pytest.mark.parametrize(
    "body",
    [
        [{"type": "http.response.body", "body": b"one", "more_body": True}, {"type": "http.response.body", "body": b"two"}],
        [{"type": "http.response.pathsend", "path": "/a/file"}],
    ],
    ids=["parts", "file"],
)
async def test_bodies_of_all_kinds_are_left_out(body: list[dict[str, Any]]) -> None:
    sent: list[Any] = []

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        assert scope["type"] == ScopeType.HTTP
        assert scope["method"] == "GET"
        for message in ({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]}, *body):
            await send(message)  # type: ignore[arg-type]

    async def send(message: Any) -> None:  # noqa: ANN401
        sent.append(message)

    await HeadMiddleware(app)({"type": "http", "method": "HEAD"}, receiving(), send)  # type: ignore[arg-type]

    start, *rest = sent
    assert start["headers"] == [(b"content-length", b"6")]
    assert [message["body"] for message in rest] == [b""] * len(body)
    assert [message["more_body"] for message in rest] == [True] * (len(body) - 1) + [False]
