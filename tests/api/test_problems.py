"""The life of a worker; and its failures, which have one shape and tell the caller nothing about the inside."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import httpx
import pytest
from litestar import Litestar, get
from litestar.exceptions import HTTPException, NotAuthorizedException
from structlog.testing import CapturedCall

from app import errors
from app.api import application
from app.api.admission import middleware
from app.api.admission.middleware import RequestContextMiddleware
from app.api.answering import problems
from app.api.application import Application
from app.errors import ClientGone, GatewayError, InvalidImage, InvalidParameter, MalformedRequest, UnsupportedMediaType
from app.pipeline.pipeline import Pipeline
from app.telemetry.metrics import Metrics
from app.triton.pool import TritonPool
from tests.support import DEPLOYMENT, METRICS, RESOURCES, calling, captured_log, json, started
from tests.world import open_world

ERRORS = [
    one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, GatewayError) and one not in {GatewayError, ClientGone}
]

Log = list[CapturedCall]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return captured_log(monkeypatch, middleware)


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


async def test_http_exception_is_a_problem_with_its_headers_and_without_its_message() -> None:
    for error, status, code, detail in (
        (NotAuthorizedException("secret", headers={"WWW-Authenticate": "Basic"}), 401, "unauthorized", "No permission"),
        (HTTPException("secret", status_code=400), 400, "malformed_request", "the request's headers or body are malformed"),
        (HTTPException("secret", status_code=409), 409, "conflict", "Request conflict"),
    ):
        response, problem = await problem_of(error)
        assert (problem["status"], problem["code"]) == (status, code)
        assert problem["detail"].startswith(detail)
        assert response.headers.get("www-authenticate") == ("Basic" if status == 401 else None)


async def test_unexpected_exception_tells_the_caller_nothing(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    unexpected = captured_log(monkeypatch, problems)
    error = ZeroDivisionError("/opt/secret/path")
    response, problem = await problem_of(error)

    assert (problem["status"], problem["code"]) == (500, "internal_error")
    assert "ZeroDivision" not in response.text
    assert "secret" not in response.text
    (call,) = unexpected
    assert (call.method_name, call.kwargs["exc_info"]) == ("error", error)
    assert call.kwargs["request_id"] == problem["request_id"] == log[0].kwargs["request_id"]
    assert (log[0].method_name, log[0].kwargs["status"]) == ("error", 500)


async def start_and_fail(app: Application) -> str:
    sent: list[dict[str, str]] = []

    async def receive() -> dict[str, str]:
        return {"type": "lifespan.startup"}

    async def send(message: dict[str, str]) -> None:
        sent.append(message)

    scope: Any = {"type": "lifespan", "asgi": {"version": "3.0"}}
    with suppress(Exception):  # Litestar raises the failure, too, in a group
        await app(scope, receive, send)  # type: ignore[arg-type]
    (message,) = sent
    assert message["type"] == "lifespan.startup.failed"
    return message["message"]


async def test_worker_is_opened_before_the_first_request_and_closed_after_the_last() -> None:
    events: list[str] = []

    @asynccontextmanager
    async def open_resources() -> AsyncIterator[tuple[TritonPool, Pipeline, Metrics]]:
        async with open_world(mode="inline") as world:
            events.append("opened")
            yield world.pool, world.pipeline, METRICS
            events.append("closed")

    app = application.build(open_resources, DEPLOYMENT)
    assert events == []
    async with started(app) as client:
        for _ in range(3):
            json(await client.get("/readyz"))
        assert events == ["opened"]

    assert events == ["opened", "closed"]
    assert "this application was started before; build another one" in await start_and_fail(app)
    assert events == ["opened", "closed"]
