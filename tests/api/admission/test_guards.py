"""What is decided before the body of a request is read."""

from collections.abc import AsyncIterator, Sequence

import httpx
import pytest

from app.api import middleware
from app.api.admission import keys
from app.api.admission.guards import guard_timing
from app.api.answering import problems
from app.api.application import Application
from app.api.context import RequestContext
from app.api.dependencies import WorkerResources
from app.api.dialects.dialect import Dialect, load
from app.api.receiving.client_watch import body_too_large
from app.main import create_app
from app.settings.schema import DIALECTS
from app.telemetry import timing
from tests.api.conftest import post_unread, routes_of, settings_for, write_keys
from tests.fakes.triton import FakeTriton, serving
from tests.support import DEPLOYMENT, SCENE, call, calling, captured_log, json, lifespan_of, receiving

LIMIT = 2**20
PATHS = pytest.mark.parametrize("path", ["/detect", "/v1/detect", "/predict/tiny", "/v1/predict/tiny"])


@PATHS
@pytest.mark.parametrize("content_type", ["text/html", "text/plain", "video/mp4", "nonsense"])
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
    """A server that passes an invalid Content-Length on gets a 400 with the code of every malformed request."""
    reply = await post_unread(shared_app, path, {"Content-Type": "image/jpeg", "Content-Length": length})

    assert (reply.status, reply.problem["code"]) == (400, "malformed_request")
    assert reply.problem["detail"] == "Content-Length is not a number"


async def test_the_last_of_several_content_types_is_judged(shared_app: Application) -> None:
    """A request with two Content-Type headers is accepted or rejected by the last one."""
    html, jpeg = ("Content-Type", "text/html"), ("Content-Type", "image/jpeg")
    body = {"type": "http.request", "body": b"no image", "more_body": False}

    accepted = await call(shared_app, receiving(body), "/detect", [html, jpeg])
    rejected = await call(shared_app, receiving(body), "/detect", [jpeg, html])

    assert accepted.problem["code"] == "unsupported_format"
    assert rejected.problem["code"] == "unsupported_media_type"


async def test_the_type_is_judged_before_the_length(shared_app: Application) -> None:
    reply = await post_unread(shared_app, "/detect", {"Content-Type": "text/html", "Content-Length": str(LIMIT + 1)})

    assert reply.status == 415


async def test_an_invalid_query_is_rejected_before_the_body_is_read(shared_app: Application) -> None:
    reply = await post_unread(shared_app, "/detect?confidence=2", {"Content-Type": "image/jpeg", "Content-Length": "100"})

    assert (reply.status, reply.problem["code"]) == (400, "invalid_parameter")


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
    """The limit is given in MiB, the unit of the setting."""
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


SECRET = "a-secret-that-must-not-be-shown"  # noqa: S105 - it protects nothing
DETECT, HEALTH = f"camera.{SECRET}", "monitor.other"
NEED_DETECT = [
    *("/detect", "/detect/batch", "/classify", "/predict/tiny", "/models"),
    *("/v1/detect", "/v1/detect/batch", "/v1/classify", "/v1/predict/tiny", "/v1/models"),
]
NEED_HEALTH = ["/health", "/metrics", "/ready", "/v1/health", "/v1/metrics", "/v1/ready"]
NEED_NONE = [
    *("/live", "/livez", "/readyz", "/v1/live", "/v1/livez", "/v1/readyz"),
    *("/", "/page-assets/page.css", "/docs", "/docs/openapi.json", "/docs-assets/swagger_style.css"),
]


@pytest.fixture(scope="module")
async def locked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Application]:
    """The real application with two keys, one for each scope."""
    file = write_keys(tmp_path_factory.mktemp("keys"), ("camera", SECRET, "detect"), ("monitor", "other", "health"))
    fake = FakeTriton()
    async with serving(fake), lifespan_of(made := create_app(settings_for(fake.url, api_keys_file=file))):
        yield made


async def ask(app: Application, path: str, headers: dict[str, str] | Sequence[tuple[str, str]] = ()) -> httpx.Response:
    """Call a route with its method; what takes an image gets the scene."""
    async with calling(app) as client:
        is_post = any(route in path for route in ("/detect", "/classify", "/predict"))
        return await client.request("POST" if is_post else "GET", path, headers=headers, content=SCENE if is_post else None)


@pytest.mark.parametrize("path", NEED_DETECT + NEED_HEALTH)
async def test_a_request_without_a_key_is_unauthorized(locked: Application, path: str) -> None:
    """The response names the scheme, as HTTP demands, and says how to send a key."""
    problem = json(response := await ask(locked, path), 401)

    assert problem["code"] == "unauthorized"
    assert problem["detail"] == "send one API key, as `Authorization: Bearer ID.SECRET` or `X-API-Key: ID.SECRET`"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", NEED_NONE)
async def test_probes_and_documentation_need_no_key(locked: Application, path: str) -> None:
    """A probe has no secret, and the documentation tells how to send one."""
    assert (await ask(locked, path)).status_code == 200


async def test_every_other_route_needs_a_key(locked: Application) -> None:
    """A route that is added later must not be open by mistake."""
    others = ("/docs", "/page-assets", *(f"/{name}/" for name in DIALECTS))
    assert {route.path for route in routes_of(locked) if not route.path.startswith(others)} == {
        path.replace("tiny", "{model:str}") for path in NEED_DETECT + NEED_HEALTH + NEED_NONE if not path.startswith(others)
    }


OPEN = {
    "/deepstack/v1/status/updateavailable",
    "/label-studio/webhook",  # Label Studio sends none there
    "/nim/v1/health/live",
    "/nim/v1/health/ready",
}


@pytest.mark.parametrize("dialect", load(DIALECTS), ids=DIALECTS)
async def test_every_route_of_a_dialect_needs_a_key(locked: Application, dialect: Dialect) -> None:
    """Only probes, and routes that reveal nothing, need none. A body that may contain the key has to be well formed."""
    async with calling(locked) as client:
        for handler in dialect.handlers:
            for path in handler.paths:
                sample = f"/{dialect.name}{path}".replace("{version:int}", "1").replace("{model:str}", "tiny")
                for method in handler.http_methods - {"OPTIONS"}:
                    response = await client.request(method, sample.replace("{name:str}", "tiny"), json={"image": "AAAA"})

                    assert (response.status_code in {400, 401}) == (sample not in OPEN), (method, sample, response.text)


@pytest.mark.parametrize("headers", [("Authorization", "Bearer {}"), ("authorization", "bearer  {}"), ("X-API-Key", "{}")])
async def test_a_key_opens_the_routes_of_its_scope(locked: Application, headers: tuple[str, str]) -> None:
    name, value = headers
    for path in NEED_DETECT:
        response = await ask(locked, path, {name: value.format(DETECT)})
        assert response.status_code in {200, 400, 415, 502}  # 400: it is no classifier; 502: Triton answers nothing
    for path in NEED_HEALTH:
        assert (await ask(locked, path, {name: value.format(HEALTH)})).status_code == 200


async def test_a_key_without_the_scope_is_forbidden(locked: Application) -> None:
    for path in NEED_HEALTH:
        problem = json(await ask(locked, path, {"X-API-Key": DETECT}), 403)
        assert (problem["code"], problem["detail"]) == ("forbidden", "the API key does not have the scope 'health'")
    for path in NEED_DETECT:
        assert json(await ask(locked, path, {"X-API-Key": HEALTH}), 403)["code"] == "forbidden"


@pytest.mark.parametrize(
    "headers",
    [
        [("X-API-Key", "")],
        [("X-API-Key", "camera")],
        [("X-API-Key", "camera.wrong")],
        [("X-API-Key", f"monitor.{SECRET}")],
        [("X-API-Key", f"nobody.{SECRET}")],
        [("X-API-Key", f"Bearer {DETECT}")],
        [("X-API-Key", DETECT + "\xff")],
        [("Authorization", DETECT)],
        [("Authorization", "Bearer")],
        [("Authorization", f"Basic {DETECT}")],
        [("Authorization", f"Bearer {DETECT}, Bearer {DETECT}")],
        [("X-API-Key", DETECT), ("X-API-Key", DETECT)],
        [("X-API-Key", DETECT), ("Authorization", f"Bearer {DETECT}")],
        [("Authorization", f"Bearer {DETECT}"), ("Authorization", f"Bearer {DETECT}")],
    ],
)
async def test_anything_but_one_valid_key_is_unauthorized(
    locked: Application, headers: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wrong, malformed or repeated: the answer is 401, and no key is in the log, because none was proven."""
    log = captured_log(monkeypatch, middleware)
    body = {"type": "http.request", "body": b"x", "more_body": False}
    reply = await call(locked, receiving(body), "/detect", headers)

    assert (reply.status, reply.problem["code"], reply.headers["www-authenticate"]) == (401, "unauthorized", "Bearer")
    assert "key" not in log[0].kwargs


@PATHS
async def test_the_key_is_judged_before_anything_else(locked: Application, path: str) -> None:
    """Without a key neither body, type nor query matter; with one that lacks the scope neither."""
    headers = {"Content-Type": "text/html"}

    assert (await post_unread(locked, path + "?confidence=2", headers)).status == 401
    assert (await post_unread(locked, path + "?confidence=2", headers | {"X-API-Key": HEALTH})).status == 403
    assert (await post_unread(locked, path + "?confidence=2", headers | {"X-API-Key": DETECT})).status == 415


async def test_the_log_has_the_id_of_the_key_and_never_its_secret(locked: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether the key is accepted, forbidden or wrong, in whichever header, and in no response either."""
    log = captured_log(monkeypatch, middleware)
    others = [captured_log(monkeypatch, module) for module in (problems, keys)]
    answers = [
        await ask(locked, path, headers)
        for path in ("/detect", "/detect?camera=1", "/health")
        for headers in ({"X-API-Key": DETECT}, {"Authorization": f"Bearer {DETECT}"}, {"X-API-Key": f"nobody.{SECRET}"})
    ]

    assert [line.kwargs.get("key") for line in log] == ["camera", "camera", None] * 3
    assert SECRET not in repr([log, *others])
    assert not [answer for answer in answers if SECRET in answer.text or SECRET in repr(answer.headers)]
