"""Every request gets an id, a clock, response headers and one log line, whatever becomes of it."""

import asyncio
import re
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import httpx
import pytest
from litestar.routes import HTTPRoute
from litestar.types import Receive, Scope, Send
from structlog.testing import CapturedCall

from app.api.admission import middleware
from app.api.admission.middleware import HeadMiddleware, RequestContextMiddleware
from app.api.application import Application
from app.api.context import context_of
from tests.api.conftest import routes_of
from tests.support import RESOURCES, SCENE, call, captured_log, chunk, receiving, staying

Log = list[CapturedCall]

_VALUES = {"model": "a", "name": "swagger_style.css", "path": "nothing"}
"""What the routes' paths may contain."""
_OF_EACH_RESPONSE = {"x-request-id", "x-process-time", "server-timing"}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return captured_log(monkeypatch, middleware)


@pytest.mark.parametrize(
    ("given", "is_kept"),
    [
        ([], False),
        (["abc-1.2_Z"], True),
        (["x" * 64], True),
        (["a b", "last"], True),
        (["first", "x" * 65], False),
        (["a\n"], False),
        (["ä"], False),
        (["<script>"], False),
    ],
)
async def test_request_id_is_kept_if_it_needs_no_escaping(
    shared_app: Application, log: Log, given: list[str], *, is_kept: bool
) -> None:
    reply = await call(shared_app, receiving(), "/livez", [("X-Request-ID", id_) for id_ in given])

    id_ = reply.headers["x-request-id"]
    assert id_ == log[0].kwargs["request_id"]
    assert id_ == given[-1] if is_kept else re.fullmatch(r"[0-9a-f]{16}", id_)
    assert re.fullmatch(r"[0-9]+\.[0-9]{2}ms", reply.headers["x-process-time"])
    assert re.fullmatch(r"total;dur=[0-9]+\.[0-9]{2}", reply.headers["server-timing"])


async def test_declared_length_ends_a_body_and_several_accept_headers_are_one_list(shared_app: Application) -> None:
    json, picture = ("Accept", "application/json;q=0.5"), ("Accept", "image/webp")
    for headers, status in (
        ([("Content-Length", str(len(SCENE))), json, picture], 200),
        ([("Content-Length", "9"), ("Transfer-Encoding", "chunked"), picture, json], 200),
        ([("Content-Length", "9")], 422),
        ([picture], 406),
    ):
        parts = chunk(SCENE[:9], more=True), chunk(SCENE[9:], more=True), chunk(b"")
        assert (await call(shared_app, staying(*parts), "/detect", headers)).status == status


async def test_log_line_has_the_method_and_the_path_of_the_caller(reader: httpx.AsyncClient, log: Log) -> None:
    await reader.head(f"/a%E2%80%A8b/{'x' * 500}?classes=secret")

    (line,) = log
    fields = {name: line.kwargs[name] for name in ("method", "route", "path", "status", "client")}
    assert fields == {
        "method": "HEAD",
        "route": "unmatched",
        "path": "/a\\u2028b/" + "x" * 195,
        "status": 404,
        "client": "127.0.0.1",
    }
    assert "secret" not in repr(line)


@pytest.mark.parametrize(
    ("response", "error", "slow_ms", "level", "status"),
    [
        (200, None, 0, "info", 200),
        (503, None, 0, "info", 503),  # while Triton restarts, there may be thousands of them
        (500, None, 0, "error", 500),
        (0, ZeroDivisionError, 0, "error", 500),  # which the server sends, and the middleware does not see
        (200, ZeroDivisionError, 0, "info", 200),
        (0, asyncio.CancelledError, 0, "info", 499),  # by the server, when the client has disconnected
        (400, None, 0, "info", 499),  # of a client that is gone
        (404, None, 1e-6, "warning", 404),
        (500, None, 1e-6, "error", 500),
        (429, None, 1e-6, "info", 429),
        (200, None, 1e6, "info", 200),
    ],
)
async def test_end_of_a_request_is_logged_and_what_waits_for_it_begins(  # noqa: PLR0913, PLR0917 - a table
    log: Log, tmp_path: Path, response: int, error: type[BaseException] | None, slow_ms: float, level: str, status: int
) -> None:
    order: list[str] = []
    (file := tmp_path / "file").write_bytes(bytes(1000))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        while (await receive()).get("more_body"):
            pass
        context = context_of(scope)
        context.is_client_gone, context.slow_request_ms = response == 400, slow_ms
        context.after_answer.append(lambda: order.append("after"))
        if response:
            await send({"type": "http.response.start", "status": response, "headers": []})
            await send({"type": "http.response.body", "body": b"four", "more_body": True})
            await send({"type": "http.response.pathsend", "path": str(file)})  # type: ignore[arg-type]
        if error:
            raise error

    async def send(message: Any) -> None:  # noqa: ANN401
        order.append(message["type"])

    scope: Any = {"type": "http", "method": "POST", "path": "/", "headers": [(b"content-length", b"9999")]}
    sent = receiving(chunk(bytes(300), more=True), chunk(bytes(20)))
    with pytest.raises(error) if error else nullcontext():
        await RequestContextMiddleware(app, RESOURCES)(scope, sent, send)

    messages = [f"http.response.{kind}" for kind in ("start", "body", "pathsend")] if response else []
    assert order == [*messages, "after"]
    (line,) = log
    assert (line.method_name, line.kwargs["status"], "slow" in line.kwargs) == (level, status, slow_ms == 1e-6 and status != 429)
    assert (line.kwargs["request_bytes"], line.kwargs["response_bytes"]) == (320, 1004 if response else 0)


async def test_head_has_the_headers_of_get_and_other_methods_are_told(shared_app: Application, reader: httpx.AsyncClient) -> None:
    paths = {
        re.sub(r"{(\w+)}", lambda found: _VALUES[found[1]], route.path_format)
        for route in routes_of(shared_app)
        # What says that search is off says so by whatever method.
        if isinstance(route, HTTPRoute) and "GET" in route.methods and "DELETE" not in route.methods
    }
    assert len(paths) > 20
    for path in [*sorted(paths), "/docs-assets/nothing", "/nowhere"]:
        got, asked = await reader.get(path), await reader.head(path)
        assert asked.status_code == got.status_code, path
        assert asked.headers.keys() == got.headers.keys() >= _OF_EACH_RESPONSE, path
        if path.removeprefix("/v1") not in {"/health", "/metrics", "/ready"}:  # which tell something else each time
            assert [(name, value) for name, value in asked.headers.items() if name not in _OF_EACH_RESPONSE] == [
                (name, value) for name, value in got.headers.items() if name not in _OF_EACH_RESPONSE
            ], path
            assert int(asked.headers["content-length"]) == len(got.content) > 0, path
        for response, status in ((await reader.options(path), 204), (await reader.put(path), 405)) if path in paths else ():
            assert response.status_code == status, path
            assert sorted({*response.headers["allow"].split(", ")} - {"POST"}) == ["GET", "HEAD", "OPTIONS"], path


async def test_bodies_of_all_kinds_are_left_out_of_the_answer_to_head() -> None:
    sent: list[Any] = []
    part, file = (
        {"type": "http.response.body", "body": b"x", "more_body": True},
        {"type": "http.response.pathsend", "path": "/file"},
    )

    async def app(scope: Scope, _: Receive, send: Send) -> None:
        assert scope["method"] == "GET"  # type: ignore[typeddict-item]
        for message in ({"type": "http.response.start", "status": 200, "headers": []}, part, file):
            await send(message)  # type: ignore[arg-type]

    async def send(message: Any) -> None:  # noqa: ANN401
        sent.append(message)

    await HeadMiddleware(app)({"type": "http", "method": "HEAD"}, receiving(), send)  # type: ignore[arg-type]
    assert [(message["body"], message["more_body"]) for message in sent[1:]] == [(b"", True), (b"", False)]
