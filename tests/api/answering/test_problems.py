"""Every failure has one shape, whoever has raised it, and tells the caller nothing about the inside."""

from typing import Any

import httpx
import pytest
from litestar import Litestar, get
from litestar.exceptions import HTTPException, NotAuthorizedException
from structlog.testing import CapturedCall

from app import errors
from app.api.admission import middleware
from app.api.admission.middleware import RequestContextMiddleware
from app.api.answering import problems
from app.errors import ClientGone, GatewayError, InvalidImage, InvalidParameter, MalformedRequest, UnsupportedMediaType
from tests.support import RESOURCES, calling, captured_log

ERRORS = [
    one
    for one in vars(errors).values()
    if isinstance(one, type) and issubclass(one, GatewayError) and one not in {GatewayError, ClientGone}
]
MEMBERS = {"type", "title", "status", "detail", "code", "request_id"}

Log = list[CapturedCall]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return captured_log(monkeypatch, middleware)


def failing(error: Exception) -> RequestContextMiddleware:
    @get("/")
    async def fail() -> None:
        raise error

    return RequestContextMiddleware(Litestar([fail], exception_handlers=problems.handlers(), logging_config=None), RESOURCES)


async def problem_of(error: Exception) -> tuple[httpx.Response, dict[str, Any]]:
    async with calling(failing(error)) as client:
        response = await client.get("/")
    assert response.headers["content-type"] == "application/problem+json"
    return response, response.json()


@pytest.mark.parametrize("error", ERRORS)
async def test_every_gateway_error_is_a_problem(error: type[GatewayError], log: Log) -> None:
    response, problem = await problem_of(error("what is wrong"))

    assert set(problem) == MEMBERS
    assert response.status_code == problem["status"] == error.status
    assert (problem["code"], problem["title"], problem["detail"]) == (error.code, error.title, "what is wrong")
    assert problem["type"] == f"urn:nereid:problem:{error.code}"
    assert problem["request_id"] == response.headers["x-request-id"]
    assert response.headers.get("retry-after") == (str(error.retry_after_seconds) if error.status in {429, 503} else None)
    (line,) = log
    assert (line.kwargs["status"], line.kwargs["code"]) == (error.status, error.code)
    assert line.kwargs.get("detail") == (None if error in {InvalidParameter, UnsupportedMediaType} else "what is wrong")
    assert "cause" not in line.kwargs


async def test_an_error_that_repeats_the_request_is_not_logged(log: Log) -> None:
    error = MalformedRequest("unknown member 'secret'", repeats_request=True)
    error.__cause__ = ValueError("secret")
    _, problem = await problem_of(error)

    assert problem["detail"] == "unknown member 'secret'"
    assert log[0].kwargs["code"] == "malformed_request"
    assert "secret" not in repr(log)


async def test_the_cause_of_an_error_is_logged_and_not_sent(log: Log) -> None:
    """The cause may contain anything; only its beginning is logged."""
    error = InvalidImage("the image data is truncated or corrupt")
    error.__cause__ = OSError("/opt/secret/path" + "x" * 5000)
    response, _ = await problem_of(error)

    assert "secret" not in response.text
    assert log[0].kwargs["cause"].startswith("OSError: /opt/secret/path")
    assert len(log[0].kwargs["cause"]) == 500


async def test_a_client_that_is_gone_is_logged_as_499_and_sent_a_400(log: Log) -> None:
    """A client that still reads the response has sent a broken body instead."""
    response, problem = await problem_of(ClientGone("the client disconnected before the end of the body"))

    assert response.status_code == problem["status"] == 400
    assert problem["code"] == "client_gone"
    assert (log[0].method_name, log[0].kwargs["status"], log[0].kwargs["code"]) == ("info", 499, "client_gone")


async def test_an_http_exception_is_a_problem_with_its_headers(log: Log) -> None:
    """Litestar's own message may contain anything and is not sent."""
    response, problem = await problem_of(NotAuthorizedException("secret", headers={"WWW-Authenticate": "Basic"}))

    assert set(problem) == MEMBERS
    assert (response.status_code, problem["code"], problem["title"]) == (401, "unauthorized", "Unauthorized")
    assert response.headers["www-authenticate"] == "Basic"
    assert "secret" not in response.text
    assert log[0].kwargs["status"] == 401


@pytest.mark.parametrize(
    ("status", "code", "detail"),
    [
        (400, "malformed_request", "the request's headers or body are malformed"),
        (409, "conflict", "Request conflict"),
    ],
)
async def test_common_http_exceptions_say_what_to_do(status: int, code: str, detail: str) -> None:
    _, problem = await problem_of(HTTPException("secret", status_code=status))

    assert (problem["status"], problem["code"], problem["detail"]) == (status, code, detail)


async def test_an_unexpected_exception_tells_the_caller_nothing(monkeypatch: pytest.MonkeyPatch, log: Log) -> None:
    unexpected = captured_log(monkeypatch, problems)
    error = ZeroDivisionError("/opt/secret/path")
    response, problem = await problem_of(error)

    assert set(problem) == MEMBERS
    assert (response.status_code, problem["code"], problem["title"]) == (500, "internal_error", "Internal error")
    assert "ZeroDivision" not in response.text
    assert "secret" not in response.text
    (call,) = unexpected
    assert call.method_name == "error"
    assert call.kwargs["exc_info"] is error
    assert call.kwargs["request_id"] == problem["request_id"] == log[0].kwargs["request_id"]
    assert (log[0].method_name, log[0].kwargs["status"]) == ("error", 500)
