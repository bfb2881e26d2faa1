"""Every request gets an id, a clock, headers and one log line; failures have one shape, which tells nothing of the inside."""

import asyncio
import re
from base64 import b64encode
from collections import Counter
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import grpc
import httpx
import pytest
from litestar import Litestar, get
from litestar.exceptions import HTTPException
from litestar.types import Receive, Scope, Send
from structlog.testing import CapturedCall

from app import errors
from app.api.admission.middleware import RequestContextMiddleware
from app.api.answering import problems
from app.api.application import Application
from app.api.context import context_of
from app.errors import ClientGone, GatewayError, InvalidImage, InvalidParameter, MalformedRequest, UnsupportedMediaType
from app.main import create_app
from tests.api.conftest import client_for, post_unread, settings_for, write_keys
from tests.fakes.triton import FakeTriton
from tests.support import (
    RESOURCES,
    SCENE,
    Reply,
    Samples,
    call,
    calling,
    captured_log,
    chunk,
    eventually,
    json,
    lifespan_of,
    receiving,
    scrape,
    staying,
    until,
)

Log = list[CapturedCall]


async def test_request_id_is_kept_if_it_needs_no_escaping(shared_app: Application, log: Log) -> None:
    for given, is_kept in (
        ([], False),
        (["a b", "abc-1.2_Z"], True),
        (["first", "x" * 65], False),
        (["a\n"], False),
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
        ([("Content-Length", "9"), ("Transfer-Encoding", "chunked")], 200),
        ([("Content-Length", "9")], 422),
        ([picture], 406),
    ):
        parts = chunk(SCENE[:9], more=True), chunk(SCENE[9:], more=True), chunk(b"")
        assert (await call(shared_app, staying(*parts), "/detect", headers)).status == status


async def test_log_line_has_the_method_and_the_path_of_the_caller(reader: httpx.AsyncClient, log: Log) -> None:
    await reader.head(f"/a%E2%80%A8b/{'x' * 500}?classes=secret")

    fields = [log[0].kwargs[name] for name in ("method", "route", "path", "status", "client")]
    assert fields == ["HEAD", "unmatched", "/a\\u2028b/" + "x" * 195, 404, "127.0.0.1"]
    assert "secret" not in repr(log)


async def test_first_request_for_a_model_is_logged_with_it(log: Log) -> None:
    image = {"name": "image", "shape": [1], "datatype": "BYTES", "data": [b64encode(SCENE).decode()]}
    async with client_for(FakeTriton().find_nothing(), dialects="kserve") as client:
        json(await client.post("/predict/first", content=SCENE))
        json(await client.post("/detect/batch?model=second", files={"images": SCENE}))
        json(await client.post("/v2/models/third/infer", json={"inputs": [image]}))

    assert [line.kwargs["model"] for line in log] == ["first", "second", "third"]


async def test_end_of_a_request_is_logged_by_its_status_and_whether_it_was_slow(log: Log) -> None:
    rows: list[tuple[int, type[BaseException] | None, float, str]] = [
        (200, None, 0, "info"),
        (500, None, 0, "error"),
        (500, ZeroDivisionError, 0, "error"),  # which the server sends, and the middleware does not see
        (499, asyncio.CancelledError, 0, "info"),  # by the server, when the client has disconnected
        (404, None, 1e-6, "warning"),
        (429, None, 1e-6, "info"),
    ]
    for status, error, slow_ms, level in rows:

        async def app(scope: Scope, _: Receive, send: Send) -> None:
            context_of(scope).slow_request_ms = slow_ms  # noqa: B023 - it is called at once
            if error:  # noqa: B023
                raise error  # noqa: B023
            await send({"type": "http.response.start", "status": status, "headers": []})  # noqa: B023

        scope: Any = {"type": "http", "method": "POST", "path": "/", "headers": []}
        with pytest.raises(error) if error else nullcontext():
            await RequestContextMiddleware(app, RESOURCES)(scope, receiving(), AsyncMock())
        line = log[-1]
        assert (line.method_name, line.kwargs["status"], "slow" in line.kwargs) == (level, status, status == 404)


async def test_request_is_rejected_before_the_body_is_read(shared_app: Application) -> None:
    """The detail does not repeat kilobytes of the request; the last of several types counts."""
    for path, headers, status, detail in (
        (
            "/detect/batch",
            [("Content-Type", "image/jpeg"), ("Content-Type", "x" * 5000)],
            415,
            f"'{'x' * 64}' is not supported for a",
        ),
        ("/detect/batch", [], 415, "a batch needs a Content-Type header; send multipart/form-data or application/json"),
        ("/detect?confidence=2", [("Content-Length", "100")], 400, "confidence: expected a number from 0 to 1"),
    ):
        reply = await post_unread(shared_app, path, headers)
        assert (reply.status, reply.problem["detail"].startswith(detail)) == (status, True)


async def test_request_for_a_full_model_is_rejected_before_the_body_is_read(filling: tuple[FakeTriton, Application]) -> None:
    fake, app = filling
    running: list[asyncio.Task[Reply]] = []
    for full, rejected, accepted in (
        ("tiny", ["/detect", "//v1//predict/tiny/", "/detect/batch"], ["/predict/other", "/classify"]),
        ("other", ["/predict/other", "/detect?confidence=0.5&model_name=other"], ["/classify"]),
    ):
        running.append(asyncio.create_task(call(app, staying(chunk(SCENE)), f"/predict/{full}")))
        await eventually(lambda: len(fake.requests) == len(running))
        for path in rejected:
            reply = await post_unread(app, path, {"Content-Type": "image/bmp", "Content-Length": "100"})
            assert (reply.status, reply.problem["code"], reply.headers["retry-after"]) == (429, "gateway_full", "1")
        for path in accepted:
            reply = await call(app, staying(chunk(b"no image")), path, {"Content-Type": "image/bmp"})
            assert reply.problem["code"] in {"unsupported_format", "wrong_task"}
    async with calling(app) as client:
        before: Samples = {}

        async def shows_both() -> bool:
            before.update(await scrape(client))
            return before.get('api_model_active_requests{model="other"}') == 1

        await until(shows_both)
        form = await client.post("/detect", files={"image": SCENE}, data={"model": "other"})  # whose model is not known before
        assert json(form, 429)["code"] == "gateway_full"
        after = await scrape(client)
    fake.may_answer.set()

    assert [reply.status for reply in await asyncio.gather(*running)] == [502, 502]
    for name in (
        'api_requests_total{endpoint="/detect",status="429"}',
        'api_rejections_total{reason="requests"}',
        'api_errors_total{code="gateway_full"}',
    ):
        assert after[name] == before[name] + 1
    assert before["api_active_requests"] == 3  # the scrape is one, too
    assert before['api_model_active_requests{model="tiny"}'] == before['api_model_request_limit{model="tiny"}'] == 1
    assert before["api_slots_in_use"] == 2 < before["api_slots"]
    assert before['api_reserved_bytes{purpose="images"}'] >= 2 * 32 * 32 * 3


async def test_flood_with_a_key_leaves_room_to_another(filling: tuple[FakeTriton, Application], tmp_path: Path) -> None:
    """One key alone may have as many requests in progress as are allowed, and each other one up to half of an equal part."""
    fake, _ = filling
    fake.find_nothing()
    fake.query_refusal = grpc.StatusCode.UNAVAILABLE, "failed to connect"  # so that nothing is known of the model's speed
    file = write_keys(tmp_path, *((key, "secret", "detect") for key in ("camera", "other")))
    async with lifespan_of(app := create_app(settings_for(fake.url, api_keys_file=file, max_requests=10))):
        fake.query_refusal = None
        sent: dict[str, list[asyncio.Task[Reply]]] = {}
        for key, admitted in (("camera", 10), ("other", 2)):
            headers = {"X-API-Key": f"{key}.secret"}
            sent[key] = [asyncio.create_task(call(app, staying(chunk(SCENE)), "/predict/tiny", headers)) for _ in range(30)]
            await eventually(lambda key=key, admitted=admitted: sum(map(asyncio.Task.done, sent[key])) >= 30 - admitted)  # type: ignore[misc]
        fake.may_answer.set()
        for key, admitted in (("camera", 10), ("other", 2)):
            answers = await asyncio.gather(*sent[key])
            assert Counter(answer.status for answer in answers) == {200: admitted, 429: 30 - admitted}


ERRORS = [
    one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, GatewayError) and one not in {GatewayError, ClientGone}
]


async def problem_of(error: Exception) -> tuple[httpx.Response, dict[str, Any]]:
    @get("/")
    async def fail() -> None:
        raise error

    app = Litestar([fail], exception_handlers=problems.handlers(), logging_config=None)
    async with calling(RequestContextMiddleware(app, RESOURCES)) as client:
        response = await client.get("/")
    assert response.headers["content-type"] == "application/problem+json"
    problem = response.json()
    assert set(problem) == {"type", "title", "status", "detail", "code", "request_id"}
    assert response.status_code == problem["status"]
    assert problem["type"] == f"urn:nereid:problem:{problem['code']}"
    assert problem["request_id"] == response.headers["x-request-id"]
    return response, problem


async def test_every_gateway_error_is_a_problem(log: Log) -> None:
    assert len(ERRORS) > 20
    for error in ERRORS:
        response, problem = await problem_of(error("what is wrong"))

        assert (problem["status"], problem["code"], problem["title"]) == (error.status, error.code, error.title)
        assert problem["detail"] == "what is wrong"
        assert response.headers.get("retry-after") == (str(error.retry_after_seconds) if error.status in {429, 503} else None)
        fields = log[-1].kwargs
        assert (fields["status"], fields["code"]) == (error.status, error.code)
        assert fields.get("detail") == (None if error in {InvalidParameter, UnsupportedMediaType} else "what is wrong")
        assert "cause" not in fields


async def test_cause_of_an_error_is_logged_and_not_sent_unless_it_repeats_the_request(log: Log) -> None:
    """The cause may contain anything; only its beginning is logged."""
    error: GatewayError = MalformedRequest("unknown member 'secret'", repeats_request=True)
    error.__cause__ = ValueError("secret")
    assert (await problem_of(error))[1]["detail"] == "unknown member 'secret'"
    assert "secret" not in repr(log)
    error = InvalidImage("the image data is truncated or corrupt")
    error.__cause__ = OSError("/opt/secret/path" + "x" * 5000)
    response, _ = await problem_of(error)

    assert "secret" not in response.text
    assert log[1].kwargs["cause"].startswith("OSError: /opt/secret/path")
    assert len(log[1].kwargs["cause"]) == 500


async def test_unexpected_exception_tells_the_caller_nothing(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    unexpected = captured_log(monkeypatch, problems)
    error = ZeroDivisionError("/opt/secret/path")
    response, problem = await problem_of(error)

    assert (problem["status"], problem["code"]) == (500, "internal_error")
    assert "ZeroDivision" not in response.text
    assert "secret" not in response.text
    assert "secret" not in (await problem_of(HTTPException("secret", status_code=409)))[0].text
    assert unexpected[0].kwargs["exc_info"] == error
    assert unexpected[0].kwargs["request_id"] == problem["request_id"] == log[0].kwargs["request_id"]
