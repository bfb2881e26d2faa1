"""What is decided before the body of a request is read."""

from typing import Any

import pytest
from litestar import Litestar
from litestar.connection import ASGIConnection
from litestar.datastructures import State

from app.api.admission.guards import guard_timing
from app.api.application import Application
from app.api.context import RequestContext
from app.api.dependencies import WorkerResources
from app.api.routes import ModelRoute
from app.telemetry import timing
from tests.api.conftest import post_unread
from tests.support import DEPLOYMENT, call, calling, receiving

LIMIT = 2**20
SUPPORTED = "image/*, application/octet-stream, multipart/form-data, application/json or application/x-www-form-urlencoded"
UNSUPPORTED = ("text/html", "text/plain", "video/mp4", "images/jpeg", "multipart/mixed", "nonsense", "x" * 5000)


@pytest.mark.parametrize(
    ("path", "headers", "status", "code", "detail"),
    [
        *(
            ("/detect", {"Content-Type": kind}, 415, "unsupported_media_type", f"{kind[:64]!r} is not supported; send {SUPPORTED}")
            for kind in UNSUPPORTED
        ),
        (
            "/detect/batch",
            {},
            415,
            "unsupported_media_type",
            "a batch needs a Content-Type header; send multipart/form-data or application/json",
        ),
        *(
            ("/detect", {"Content-Type": kind, "Content-Length": str(LIMIT + 1)}, 413, "body_too_large", "the limit is 1 MiB")
            for kind in ("image/jpeg", "multipart/form-data; boundary=b", "application/json", "")
        ),
        *(
            ("/detect", {"Content-Length": length}, 400, "malformed_request", "Content-Length is not a number")
            for length in ("many", "", "1.5", "-")
        ),
        ("/detect?confidence=2", {"Content-Length": "100"}, 400, "invalid_parameter", "confidence: expected a number from 0 to 1"),
    ],
)
async def test_a_request_is_rejected_before_the_body_is_read(  # noqa: PLR0913, PLR0917 - a table
    shared_app: Application, path: str, headers: dict[str, str], status: int, code: str, detail: str
) -> None:
    """The detail says the limit in the unit of the setting, and does not repeat kilobytes of the request."""
    reply = await post_unread(shared_app, path, headers)

    assert (reply.status, reply.problem["code"], reply.problem["detail"]) == (status, code, detail)


async def test_a_declared_length_of_the_limit_is_accepted(shared_app: Application) -> None:
    body = {"type": "http.request", "body": b"x" * LIMIT, "more_body": False}
    reply = await call(shared_app, receiving(body), "/detect", {"Content-Type": "image/jpeg", "Content-Length": str(LIMIT)})

    assert (reply.status, reply.problem["code"]) == (415, "unsupported_format")


async def test_the_last_of_several_content_types_is_judged(shared_app: Application) -> None:
    html, jpeg = ("Content-Type", "text/html"), ("Content-Type", "image/jpeg")
    body = {"type": "http.request", "body": b"no image", "more_body": False}

    accepted = await call(shared_app, receiving(body), "/detect", [html, jpeg])
    rejected = await call(shared_app, receiving(body), "/detect", [jpeg, html])

    assert accepted.problem["code"] == "unsupported_format"
    assert rejected.problem["code"] == "unsupported_media_type"


@pytest.mark.parametrize("path", ["/detect", "/detect/batch", "/detect/batch/", "/v1/detect/batch", "/classify", "/predict/tiny"])
async def test_options_request_is_not_judged_by_its_body(shared_app: Application, path: str) -> None:
    async with calling(shared_app) as client:
        for headers in ({}, {"Content-Type": "text/html", "Content-Length": str(LIMIT * 1000)}):
            response = await client.options(path, headers=headers)

            assert response.status_code == 204
            assert sorted(response.headers["allow"].split(", ")) == ["OPTIONS", "POST"]


async def test_the_stages_begin_when_the_request_has_passed_the_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time before that is part of the total, but of no stage."""
    now = 10.0
    monkeypatch.setattr(timing, "perf_counter", lambda: now)
    context, worker = RequestContext("id", ""), WorkerResources(DEPLOYMENT._replace(slow_request_ms=7.0))
    app = Litestar(state=State({"worker": worker}, deep_copy=False))
    scope: Any = {"type": "http", "state": {"request_context": context}, "litestar_app": app}
    now = 10.5
    await guard_timing(ASGIConnection(scope), ModelRoute("/detect"))
    now = 10.75
    context.timing.lap("read")

    assert context.slow_request_ms == 7.0
    assert context.timing.stages == {"read": 250.0}
    assert context.timing.total == 750.0
