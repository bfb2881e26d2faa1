"""Who may use which route, and what the log says of the caller."""

from collections.abc import AsyncIterator, Sequence

import httpx
import pytest

from app.api.admin import ROUTES
from app.api.admission import middleware
from app.api.answering import problems
from app.api.application import Application
from app.api.dialects.dialect import Dialect, load
from app.api.pass_on import ask_search
from app.api.reports.instead import instead
from app.api.routes import VERSION
from app.api.routing import ADMIN_ROUTES
from app.main import create_app
from app.resilience import last_valid
from app.settings.schema import DIALECTS
from tests.api.conftest import routes_of, settings_for, write_keys
from tests.fakes.triton import FakeTriton, serving
from tests.support import SCENE, call, calling, captured_log, json, lifespan_of, receiving

SECRET = "a-secret-that-must-not-be-shown"  # noqa: S105 - it protects nothing
DETECT, HEALTH = f"camera.{SECRET}", "monitor.other"
NEED_DETECT = [
    *(f"{prefix}/{task}{rest}" for prefix in ("", "/v1") for task in ("segment", "pose", "obb") for rest in ("", "/batch")),
    *("/detect", "/detect/batch", "/classify", "/predict/tiny", "/models", "/models/tiny", "/routes"),
    *(
        prefix + path
        for prefix in ("", "/v1")
        for path in (
            *("/ocr/predict", "/ocr/batch", "/analyze", "/analyze/batch"),
            *("/embed/image", "/embed/batch", "/embed/boxes", "/embed/text"),
            *("/faces/detect", "/faces/recognize", "/faces/verify"),
        )
    ),
    *("/v1/detect", "/v1/detect/batch", "/v1/classify", "/v1/predict/tiny", "/v1/models", "/v1/models/tiny", "/v1/routes"),
]
NEED_ADMIN = [prefix + path for route in [*ROUTES, *ADMIN_ROUTES] for path in route.paths for prefix in ("", VERSION)]
NEED_HEALTH = ["/health", "/metrics", "/ready", "/v1/health", "/v1/metrics", "/v1/ready"]
NEED_NONE = [
    *(version + path for version in ("", "/v1") for path in ("/live", "/livez", "/livez/triton", "/readyz")),
    *("/", "/v1", "/page-assets/page.css", "/v1/page-assets/page.css"),
    *("/docs", "/docs/openapi.json", "/docs-assets/swagger_style.css"),
]
NOT_OFFERED = [prefix + path for path in sorted(instead.paths | ask_search.paths) for prefix in ("", VERSION)]


@pytest.fixture(scope="module")
async def locked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Application]:
    """The real application with two keys, one for each scope."""
    file = write_keys(tmp_path_factory.mktemp("keys"), ("camera", SECRET, "detect"), ("monitor", "other", "health"))
    fake = FakeTriton()
    async with (
        serving(fake),
        lifespan_of(made := create_app(settings_for(fake.url, api_keys_file=file, dialects=",".join(DIALECTS), faces=True))),
    ):
        yield made


async def ask(app: Application, path: str, headers: dict[str, str] | Sequence[tuple[str, str]] = ()) -> httpx.Response:
    async with calling(app) as client:
        route = path.partition("?")[0]
        is_post = route in NEED_DETECT and not route.removeprefix(VERSION).startswith(("/models", "/routes"))
        return await client.request("POST" if is_post else "GET", path, headers=headers, content=SCENE if is_post else None)


@pytest.mark.parametrize("path", NEED_DETECT + NEED_HEALTH)
async def test_a_request_without_a_key_is_unauthorized(locked: Application, path: str) -> None:
    problem = json(response := await ask(locked, path), 401)

    assert problem["code"] == "unauthorized"
    assert problem["detail"] == "send one API key, as `Authorization: Bearer ID.SECRET` or `X-API-Key: ID.SECRET`"
    assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", NEED_NONE)
async def test_probes_and_documentation_need_no_key(locked: Application, path: str) -> None:
    """A probe has no secret, and the documentation tells how to send one."""
    assert (await ask(locked, path)).status_code == 200


@pytest.mark.parametrize("path", [path for path in NOT_OFFERED if path != "/predict"])  # it is Ultralytics', unless it has JSON
async def test_routes_that_are_not_offered_are_404_without_a_key(locked: Application, path: str) -> None:
    assert json(await ask(locked, path), 404)["code"] == "not_offered"


async def test_every_other_route_needs_a_key(locked: Application) -> None:
    """A route that is added later must not be open by mistake."""
    others = ("/docs", "/page-assets", "/v1/page-assets", *(f"/{name}/" for name in DIALECTS))
    paths = {path.replace("tiny", "{model:str}") for path in NEED_DETECT + NEED_ADMIN + NEED_HEALTH + NEED_NONE + NOT_OFFERED}
    found = {route.path for route in routes_of(locked)}
    assert {path for path in found if not path.startswith(others)} == {path for path in paths if not path.startswith(others)}


OPEN = {
    "/deepstack/v1/status/updateavailable",
    *(f"/deepstack/v1/vision/face/{action}" for action in ("register", "recognize", "list", "delete")),  # not there yet
    *(f"/roboflow/clip/{action}" for action in ("embed_text", "compare")),  # not there
    "/nim/v1/health/live",
    "/nim/v1/health/ready",
    "/kserve/v2/health/live",
    "/kserve/v2/health/ready",
}


@pytest.mark.parametrize("dialect", load(DIALECTS), ids=DIALECTS)
async def test_every_route_of_a_dialect_needs_a_key(locked: Application, dialect: Dialect) -> None:
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
        assert response.status_code in {200, 400, 404, 415, 502}  # 400: no classifier; 404: not listed; 502: Triton answers nothing
    for path in NEED_HEALTH:
        assert (await ask(locked, path, {name: value.format(HEALTH)})).status_code == 200


async def test_a_key_without_the_scope_is_forbidden(locked: Application) -> None:
    for path in NEED_HEALTH:
        problem = json(await ask(locked, path, {"X-API-Key": DETECT}), 403)
        assert (problem["code"], problem["detail"]) == (
            "forbidden",
            "the API key does not have the scope 'health'; its `scopes` in the file of keys can be extended",
        )
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
async def test_wrong_malformed_and_repeated_keys_are_unauthorized(
    locked: Application, headers: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    log = captured_log(monkeypatch, middleware)
    body = {"type": "http.request", "body": b"x", "more_body": False}
    reply = await call(locked, receiving(body), "/detect", headers)

    assert (reply.status, reply.problem["code"], reply.headers["www-authenticate"]) == (401, "unauthorized", "Bearer")
    assert "key" not in log[0].kwargs


async def test_the_log_has_the_id_of_the_key_and_never_its_secret(locked: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    log = captured_log(monkeypatch, middleware)
    others = [captured_log(monkeypatch, module) for module in (problems, last_valid)]
    answers = [
        await ask(locked, path, headers)
        for path in ("/detect", "/detect?camera=1", "/health")
        for headers in ({"X-API-Key": DETECT}, {"Authorization": f"Bearer {DETECT}"}, {"X-API-Key": f"nobody.{SECRET}"})
    ]

    assert [line.kwargs.get("key") for line in log] == ["camera", "camera", None] * 3
    assert SECRET not in repr([log, *others])
    assert not [answer for answer in answers if SECRET in answer.text or SECRET in repr(answer.headers)]
