"""What is decided before the body of a request is read."""

import pytest

from app.api.admission.guards import guard_timing
from app.api.application import Application
from app.api.context import RequestContext
from app.api.dependencies import WorkerResources
from app.api.receiving.client_watch import body_too_large
from app.telemetry import timing
from tests.api.conftest import post_unread
from tests.support import DEPLOYMENT, call, calling, receiving

LIMIT = 2**20
PATHS = pytest.mark.parametrize("path", ["/detect", "/v1/detect", "/predict/tiny", "/v1/predict/tiny"])


@PATHS
@pytest.mark.parametrize("content_type", ["text/html", "text/plain", "video/mp4", "images/jpeg", "multipart/mixed", "nonsense"])
async def test_an_unsupported_type_is_rejected_before_the_body_is_read(
    shared_app: Application, path: str, content_type: str
) -> None:
    reply = await post_unread(shared_app, path, {"Content-Type": content_type, "Content-Length": "100"})

    assert reply.status == 415
    assert reply.problem["code"] == "unsupported_media_type"
    assert reply.problem["detail"].startswith(f"'{content_type}' is not supported; send image/*")


async def test_all_supported_types_are_listed(shared_app: Application) -> None:
    """With that of forms without files; a batch that declares none is told that it must."""
    reply = await post_unread(shared_app, "/detect", {"Content-Type": "text/html"})
    batch = await post_unread(shared_app, "/detect/batch", {})

    assert reply.problem["detail"].endswith("multipart/form-data, application/json or application/x-www-form-urlencoded")
    assert (batch.status, batch.problem["detail"]) == (
        415,
        "a batch needs a Content-Type header; send multipart/form-data or application/json",
    )


async def test_a_long_type_is_quoted_in_part(shared_app: Application) -> None:
    """The response does not repeat kilobytes of the request."""
    reply = await post_unread(shared_app, "/detect", {"Content-Type": "x" * 5000})

    assert reply.problem["detail"].startswith(f"'{'x' * 64}' is not supported")


@PATHS
@pytest.mark.parametrize("content_type", ["image/jpeg", "multipart/form-data; boundary=b", "application/json", ""])
async def test_a_declared_length_above_the_limit_is_rejected_before_the_body_is_read(
    shared_app: Application, path: str, content_type: str
) -> None:
    """Whatever the type; the detail says the limit in the unit of the setting."""
    reply = await post_unread(shared_app, path, {"Content-Type": content_type, "Content-Length": str(LIMIT + 1)})

    assert reply.status == 413
    assert reply.problem["code"] == "body_too_large"
    assert reply.problem["detail"] == "the limit is 1 MiB"


async def test_a_declared_length_of_the_limit_is_accepted(shared_app: Application) -> None:
    body = {"type": "http.request", "body": b"x" * LIMIT, "more_body": False}
    reply = await call(shared_app, receiving(body), "/detect", {"Content-Type": "image/jpeg", "Content-Length": str(LIMIT)})

    assert (reply.status, reply.problem["code"]) == (415, "unsupported_format")


async def test_a_body_without_a_declared_length_is_counted(shared_app: Application) -> None:
    body = {"type": "http.request", "body": b"x" * (LIMIT // 2 + 1), "more_body": True}
    reply = await call(shared_app, receiving(body, body, body), "/detect", {"Content-Type": "image/jpeg"})

    assert (reply.status, reply.problem["code"], reply.problem["detail"]) == (413, "body_too_large", "the limit is 1 MiB")


@PATHS
@pytest.mark.parametrize("length", ["many", "", "1.5", "-"])
async def test_a_length_that_is_not_a_number_is_a_malformed_request(shared_app: Application, path: str, length: str) -> None:
    reply = await post_unread(shared_app, path, {"Content-Type": "image/jpeg", "Content-Length": length})

    assert (reply.status, reply.problem["code"]) == (400, "malformed_request")
    assert reply.problem["detail"] == "Content-Length is not a number"


async def test_the_last_of_several_content_types_is_judged(shared_app: Application) -> None:
    html, jpeg = ("Content-Type", "text/html"), ("Content-Type", "image/jpeg")
    body = {"type": "http.request", "body": b"no image", "more_body": False}

    accepted = await call(shared_app, receiving(body), "/detect", [html, jpeg])
    rejected = await call(shared_app, receiving(body), "/detect", [jpeg, html])

    assert accepted.problem["code"] == "unsupported_format"
    assert rejected.problem["code"] == "unsupported_media_type"


@pytest.mark.parametrize("path", ["/detect", "/detect/batch", "/detect/batch/", "/v1/detect/batch", "/classify", "/predict/tiny"])
async def test_who_asks_for_methods_sends_no_body(shared_app: Application, path: str) -> None:
    async with calling(shared_app) as client:
        for headers in ({}, {"Content-Type": "text/html", "Content-Length": str(LIMIT * 1000)}):
            response = await client.options(path, headers=headers)

            assert response.status_code == 204
            assert sorted(response.headers["allow"].split(", ")) == ["OPTIONS", "POST"]


@pytest.mark.parametrize(
    ("limit", "text"), [(2**20, "1 MiB"), (50 * 2**20, "50 MiB"), (2**19, "0.5 MiB"), (1024 * 2**20, "1024 MiB")]
)
def test_a_payload_above_the_limit_is_told_the_limit(limit: int, text: str) -> None:
    assert body_too_large(limit).detail == f"the limit is {text}"


def test_the_stages_begin_when_the_request_has_passed_the_guards(monkeypatch: pytest.MonkeyPatch) -> None:
    """The time before that is part of the total, but of no stage."""
    now = 10.0
    monkeypatch.setattr(timing, "perf_counter", lambda: now)
    context, worker = RequestContext("id", ""), WorkerResources(DEPLOYMENT._replace(slow_request_ms=7.0))
    now = 10.5
    guard_timing(context, worker)
    now = 10.75
    context.timing.lap("read")

    assert context.slow_request_ms == 7.0
    assert context.timing.stages == {"read": 250.0}
    assert context.timing.total == 750.0


async def test_an_invalid_query_is_rejected_before_the_body_is_read(shared_app: Application) -> None:
    reply = await post_unread(shared_app, "/detect?confidence=2", {"Content-Type": "image/jpeg", "Content-Length": "100"})

    assert (reply.status, reply.problem["code"]) == (400, "invalid_parameter")
