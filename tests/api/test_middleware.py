"""Every request gets an id, a clock, response headers and one log line; some end before their body is read."""

import asyncio
import re
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import pytest
from litestar.routes import HTTPRoute
from litestar.types import Receive, Scope, Send
from structlog.testing import CapturedCall

from app.api.admission import middleware
from app.api.admission.middleware import RequestContextMiddleware
from app.api.application import Application
from app.api.context import context_of
from app.main import create_app
from tests.api.conftest import post_unread, routes_of, settings_for, write_keys
from tests.fakes.triton import FakeTriton, infer_response
from tests.support import (
    RESOURCES,
    SCENE,
    Reply,
    call,
    calling,
    captured_log,
    chunk,
    eventually,
    json,
    lifespan_of,
    receiving,
    staying,
)

Log = list[CapturedCall]

_VALUES = {"model": "a", "name": "swagger_style.css", "path": "nothing"}
"""What the routes' paths may contain."""
_OF_EACH_RESPONSE = {"x-request-id", "x-process-time", "server-timing"}


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return captured_log(monkeypatch, middleware)


async def test_request_id_is_kept_if_it_needs_no_escaping(shared_app: Application, log: Log) -> None:
    for given, is_kept in (
        ([], False),
        (["a b", "abc-1.2_Z"], True),
        (["first", "x" * 65], False),
        (["a\n"], False),
        (["<script>"], False),
    ):
        reply = await call(shared_app, receiving(), "/livez", [("X-Request-ID", id_) for id_ in given])
        id_ = reply.headers["x-request-id"]
        assert id_ == log[-1].kwargs["request_id"]
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
        (500, None, 0, "error", 500),
        (0, ZeroDivisionError, 0, "error", 500),  # which the server sends, and the middleware does not see
        (0, asyncio.CancelledError, 0, "info", 499),  # by the server, when the client has disconnected
        (400, None, 0, "info", 499),  # of a client that is gone
        (404, None, 1e-6, "warning", 404),
        (429, None, 1e-6, "info", 429),
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


SUPPORTED = "image/*, application/octet-stream, multipart/form-data, application/json or application/x-www-form-urlencoded"
HTML, JPEG = ("Content-Type", "text/html"), ("Content-Type", "image/jpeg")


async def test_request_is_rejected_before_the_body_is_read(shared_app: Application) -> None:
    """The detail does not repeat kilobytes of the request; the last of several types counts."""
    for path, headers, status, detail in (
        ("/detect", [JPEG, HTML], 415, f"'text/html' is not supported; send {SUPPORTED}"),
        ("/detect", [("Content-Type", "x" * 5000)], 415, f"'{'x' * 64}' is not supported; send {SUPPORTED}"),
        ("/detect/batch", [], 415, "a batch needs a Content-Type header; send multipart/form-data or application/json"),
        ("/detect", [JPEG, ("Content-Length", str(2**20 + 1))], 413, "the limit is 1 MiB"),
        ("/detect?confidence=2", [("Content-Length", "100")], 400, "confidence: expected a number from 0 to 1"),
    ):
        reply = await post_unread(shared_app, path, headers)
        assert (reply.status, reply.problem["detail"]) == (status, detail)


async def test_request_for_a_full_model_is_rejected_before_the_body_is_read(filling: tuple[FakeTriton, Application]) -> None:
    fake, app = filling
    running: list[asyncio.Task[Reply]] = []
    for full, rejected, accepted in (
        ("tiny", ["/detect", "/v1/detect?model=tiny", "//v1//predict/tiny/", "/detect/batch"], ["/predict/other", "/classify"]),
        ("other", ["/predict/other", "/detect?confidence=0.5&model_name=other", "/v1/detect/batch?model=other"], ["/classify"]),
    ):
        running.append(asyncio.create_task(call(app, staying(chunk(SCENE)), f"/predict/{full}")))
        await eventually(lambda: len(fake.requests) == len(running))
        for path in rejected:
            reply = await post_unread(app, path, {"Content-Type": "image/bmp", "Content-Length": "100"})
            assert (reply.status, reply.problem["code"], reply.headers["retry-after"]) == (429, "gateway_full", "1")
        for path in accepted:
            reply = await call(app, staying(chunk(b"no image")), path, {"Content-Type": "image/bmp"})
            assert reply.problem["code"] in {"unsupported_format", "wrong_task"}
    others = ("GET", "/livez"), ("GET", "/detect"), ("POST", "/livez"), ("POST", "/detections"), ("POST", "/predict/a/b")
    async with calling(app) as client:
        form = await client.post("/detect", files={"image": SCENE}, data={"model": "other"})  # whose model is not known before
        assert json(form, 429)["code"] == "gateway_full"
        assert [(await client.request(method, path)).status_code for method, path in others] == [200, 405, 405, 404, 404]
    fake.may_answer.set()

    assert [reply.status for reply in await asyncio.gather(*running)] == [502, 502]


async def test_flood_with_a_key_leaves_room_to_another(
    filling: tuple[FakeTriton, Application], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One key alone may have as many requests in progress as are allowed, and each other one up to half of an equal part."""
    fake, _ = filling
    fake.answer = infer_response(output0=np.zeros((2, 6), np.float32))
    fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"  # so that nothing is known of the model's speed
    file = write_keys(tmp_path, *((key, "secret", "detect") for key in ("camera", "other")))
    log = captured_log(monkeypatch, middleware)
    async with lifespan_of(app := create_app(settings_for(fake.url, api_keys_file=file, max_requests=10))):
        fake.query_refusal = None
        sent: dict[str, list[asyncio.Task[Reply]]] = {}
        for key, rejected in (("camera", 20), ("other", 28)):
            headers = {"X-API-Key": f"{key}.secret"}
            sent[key] = [asyncio.create_task(call(app, staying(chunk(SCENE)), "/predict/tiny", headers)) for _ in range(30)]
            await eventually(lambda key=key, rejected=rejected: sum(map(asyncio.Task.done, sent[key])) == rejected)  # type: ignore[misc]
            assert {line.kwargs["status"]: (line.kwargs["key"], line.kwargs["model"]) for line in log} == {429: (key, "tiny")}
            log.clear()
        fake.may_answer.set()

        for key, admitted in (("camera", 10), ("other", 2)):
            answers = await asyncio.gather(*sent[key])
            assert Counter(answer.status for answer in answers) == {200: admitted, 429: 30 - admitted}
