"""What is decided before the body of a request is read."""

from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from litestar import Litestar, Request, post
from litestar.exceptions.http_exceptions import RequestEntityTooLarge
from litestar.handlers.base import BaseRouteHandler
from litestar.testing import RequestFactory

from app.api.application import Application
from app.api.context import RequestContext, attach
from app.api.guards import combine_guards, guard_payload, guard_timing
from app.errors import UnsupportedMediaType
from app.main import create_app
from app.telemetry import timing
from tests.api.conftest import settings_for
from tests.fakes.triton import FakeTriton, serving
from tests.support import Reply, call, lifespan_of, receiving

LIMIT = 2**20
PATHS = pytest.mark.parametrize("path", ["/detect", "/v1/detect", "/predict/tiny", "/v1/predict/tiny"])


@pytest.fixture
async def app() -> AsyncIterator[Application]:
    """The real application, which accepts bodies of one MiB."""
    fake = FakeTriton()
    async with serving(fake):
        made = create_app(settings_for(fake.url, max_file_size_mb=1))
        async with lifespan_of(made):
            yield made


async def post_unread(app: Application, path: str, headers: dict[str, str]) -> Reply:
    """POST without a body; the application must not even ask for one."""

    async def receive() -> Any:  # noqa: ANN401
        raise AssertionError("the body was read")

    return await call(app, receive, path, headers)


@PATHS
@pytest.mark.parametrize("content_type", ["text/html", "application/x-www-form-urlencoded", "video/mp4", "nonsense"])
async def test_an_unsupported_type_is_rejected_before_the_body_is_read(app: Application, path: str, content_type: str) -> None:
    """On every route that takes an image."""
    reply = await post_unread(app, path, {"Content-Type": content_type, "Content-Length": "100"})

    assert reply.status == 415
    assert reply.problem["code"] == "unsupported_media_type"
    assert reply.problem["detail"].startswith(f"'{content_type}' is not supported; send image/*")


async def test_a_long_type_is_quoted_in_part(app: Application) -> None:
    """The response does not repeat kilobytes of the request."""
    reply = await post_unread(app, "/detect", {"Content-Type": "x" * 5000})

    assert reply.problem["detail"].startswith(f"'{'x' * 64}' is not supported")


@PATHS
@pytest.mark.parametrize("content_type", ["image/jpeg", "multipart/form-data; boundary=b", "application/json", ""])
async def test_a_declared_length_above_the_limit_is_rejected_before_the_body_is_read(
    app: Application, path: str, content_type: str
) -> None:
    """Whatever the type; the detail says the limit in the unit of the setting."""
    reply = await post_unread(app, path, {"Content-Type": content_type, "Content-Length": str(LIMIT + 1)})

    assert reply.status == 413
    assert reply.problem["code"] == "body_too_large"
    assert reply.problem["detail"] == "the limit is 1 MiB"


async def test_a_declared_length_of_the_limit_is_accepted(app: Application) -> None:
    """The body is then read, and judged by its bytes."""
    body = {"type": "http.request", "body": b"x" * LIMIT, "more_body": False}
    reply = await call(app, receiving(body), "/detect", {"Content-Type": "image/jpeg", "Content-Length": str(LIMIT)})

    assert (reply.status, reply.problem["code"]) == (415, "unsupported_format")


async def test_a_body_without_a_declared_length_is_counted(app: Application) -> None:
    """The limit is that of the body, not of the header."""
    body = {"type": "http.request", "body": b"x" * (LIMIT // 2 + 1), "more_body": True}
    reply = await call(app, receiving(body, body, body), "/detect", {"Content-Type": "image/jpeg"})

    assert (reply.status, reply.problem["code"], reply.problem["detail"]) == (413, "body_too_large", "the limit is 1 MiB")


@PATHS
@pytest.mark.parametrize("length", ["many", "", "1.5", "-"])
async def test_a_length_that_is_not_a_number_is_a_malformed_request(app: Application, path: str, length: str) -> None:
    """A server that passes an invalid Content-Length on gets a 400 with the code of every malformed request."""
    reply = await post_unread(app, path, {"Content-Type": "image/jpeg", "Content-Length": length})

    assert (reply.status, reply.problem["code"]) == (400, "malformed_request")
    assert reply.problem["detail"] == "the request's headers or body are malformed"


async def test_the_last_of_several_content_types_is_judged(app: Application) -> None:
    """A request with two Content-Type headers is accepted or rejected by the last one."""
    html, jpeg = ("Content-Type", "text/html"), ("Content-Type", "image/jpeg")
    body = {"type": "http.request", "body": b"no image", "more_body": False}

    accepted = await call(app, receiving(body), "/detect", [html, jpeg])
    rejected = await call(app, receiving(body), "/detect", [jpeg, html])

    assert accepted.problem["code"] == "unsupported_format"
    assert rejected.problem["code"] == "unsupported_media_type"


async def test_the_type_is_judged_before_the_length(app: Application) -> None:
    """A body that is wrong in both ways needs another type first."""
    reply = await post_unread(app, "/detect", {"Content-Type": "text/html", "Content-Length": str(LIMIT + 1)})

    assert reply.status == 415


async def test_an_invalid_query_is_rejected_before_the_body_is_read(app: Application) -> None:
    """The query is invalid for any image."""
    reply = await post_unread(app, "/detect?confidence=2", {"Content-Type": "image/jpeg", "Content-Length": "100"})

    assert (reply.status, reply.problem["code"]) == (400, "invalid_parameter")


def connection(headers: dict[str, str], limit: int | None) -> Request[Any, Any, Any]:
    """Make a request to a route with this limit."""

    @post("/", request_max_body_size=limit)
    async def handler() -> None:
        """Never called."""

    app = Litestar([handler], logging_config=None)
    made: Request[Any, Any, Any] = RequestFactory(app=app).post("/", headers=headers, route_handler=app.routes[0].route_handlers[0])  # type: ignore[union-attr]
    attach(RequestContext("id", headers.get("Content-Type", "")), made.scope)
    return made


@pytest.mark.parametrize(("length", "limit"), [("100", 100), ("0", 100), ("5000", None)])
def test_a_payload_within_the_limit_passes(length: str, limit: int | None) -> None:
    """A route may also have none."""
    guard_payload(connection({"Content-Type": "image/jpeg", "Content-Length": length}, limit))


def test_the_limit_is_that_of_the_route() -> None:
    """The guard uses the limit of the route, not a constant."""
    headers = {"Content-Type": "image/jpeg", "Content-Length": "101"}
    guard_payload(connection(headers, 101))
    with pytest.raises(RequestEntityTooLarge):
        guard_payload(connection(headers, 100))


def test_an_unsupported_type_is_rejected() -> None:
    """Whatever the length."""
    with pytest.raises(UnsupportedMediaType, match="text/html"):
        guard_payload(connection({"Content-Type": "text/html", "Content-Length": "1"}, 100))


def test_the_stages_begin_when_the_request_has_passed_the_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time before that is part of the total, but of no stage."""
    now = 10.0
    monkeypatch.setattr(timing, "perf_counter", lambda: now)
    request = connection({}, None)
    context = RequestContext("id", "")
    attach(context, request.scope)
    now = 10.5
    guard_timing(request)
    now = 10.75
    context.timing.lap("read")

    assert context.timing.stages == {"read": 250.0}
    assert context.timing.total == 750.0


async def test_combined_guards_run_in_order() -> None:
    """Each of them sees the connection."""
    seen: list[tuple[str, object]] = []
    guard = combine_guards(lambda given: seen.append(("a", given)), lambda given: seen.append(("b", given)))
    request = connection({}, None)
    await cast("Any", guard)(request, cast("BaseRouteHandler", None))

    assert seen == [("a", request), ("b", request)]


async def test_the_first_guard_that_rejects_is_the_last() -> None:
    """Its error is the response."""
    seen: list[object] = []

    def refuse(_: object) -> None:
        raise UnsupportedMediaType("no")

    guard = combine_guards(refuse, seen.append)
    with pytest.raises(UnsupportedMediaType):
        await cast("Any", guard)(connection({}, None), cast("BaseRouteHandler", None))

    assert seen == []
