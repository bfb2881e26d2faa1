"""Who may use which route, and what the log says of the caller."""

from collections.abc import AsyncIterator, Sequence
from ipaddress import ip_network
from typing import Any

import httpx
import pytest

from app.api.admin import ROUTES
from app.api.admission import middleware
from app.api.answering import problems
from app.api.application import Application
from app.api.caller.client_address import client_address
from app.api.dialects.dialect import load
from app.api.pass_on import ask_search
from app.api.reports.instead import instead
from app.api.routes import VERSION
from app.api.routing import ADMIN_ROUTES
from app.main import create_app
from app.resilience import last_valid
from app.settings.schema import DIALECTS
from tests.api.conftest import routes_of, settings_for, write_keys
from tests.fakes.triton import FakeTriton, serving
from tests.support import SCENE, call, calling, captured_log, chunk, json, lifespan_of, receiving

SECRET = "a-secret-that-must-not-be-shown"  # noqa: S105 - it protects nothing
DETECT, HEALTH = f"camera.{SECRET}", "monitor.other"
POSTED = [
    *(f"/{task}{rest}" for task in ("detect", "segment", "pose", "obb", "analyze") for rest in ("", "/batch")),
    *("/classify", "/predict/tiny", "/ocr/predict", "/ocr/batch", "/faces/detect", "/faces/recognize", "/faces/verify"),
    *("/embed/image", "/embed/batch", "/embed/boxes", "/embed/text"),
]
NEED_DETECT = [prefix + path for prefix in ("", VERSION) for path in (*POSTED, "/models", "/models/tiny", "/routes")]
NEED_ADMIN = [prefix + path for route in [*ROUTES, *ADMIN_ROUTES] for path in route.paths for prefix in ("", VERSION)]
NEED_HEALTH = [prefix + path for prefix in ("", VERSION) for path in ("/health", "/metrics", "/ready")]
NEED_NONE = [
    *(version + path for version in ("", "/v1") for path in ("/live", "/livez", "/livez/triton", "/readyz")),
    *("/", "/v1", "/page-assets/page.css", "/v1/page-assets/page.css"),
    *("/docs", "/docs/openapi.json", "/docs-assets/swagger_style.css"),
]
NOT_OFFERED = [prefix + path for path in sorted(instead.paths | ask_search.paths) for prefix in ("", VERSION)]
OPEN = {
    "/deepstack/v1/status/updateavailable",
    *(f"/deepstack/v1/vision/face/{action}" for action in ("register", "recognize", "list", "delete")),  # not there yet
    *(f"/roboflow/clip/{action}" for action in ("embed_text", "compare")),  # not there
    *(f"/{dialect}/health/{state}" for dialect in ("nim/v1", "kserve/v2") for state in ("live", "ready")),
}


@pytest.fixture(scope="module")
async def locked(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Application]:
    """The real application with two keys, one for each scope."""
    file = write_keys(tmp_path_factory.mktemp("keys"), ("camera", SECRET, "detect"), ("monitor", "other", "health"))
    settings = {"api_keys_file": file, "dialects": ",".join(DIALECTS), "faces": True}
    async with serving(fake := FakeTriton()), lifespan_of(made := create_app(settings_for(fake.url, **settings))):
        yield made


async def ask(app: Application, path: str, headers: dict[str, str] | Sequence[tuple[str, str]] = ()) -> httpx.Response:
    async with calling(app) as client:
        is_post = path.partition("?")[0].removeprefix(VERSION) in POSTED
        return await client.request("POST" if is_post else "GET", path, headers=headers, content=SCENE if is_post else None)


async def test_request_without_a_key_is_unauthorized(locked: Application) -> None:
    for path in NEED_DETECT + NEED_HEALTH:
        problem = json(response := await ask(locked, path), 401)

        assert problem["code"] == "unauthorized"
        assert problem["detail"] == "send one API key, as `Authorization: Bearer ID.SECRET` or `X-API-Key: ID.SECRET`"
        assert response.headers["www-authenticate"] == "Bearer"


async def test_probes_documentation_and_what_is_not_offered_need_no_key(locked: Application) -> None:
    """A probe has no secret, and the documentation tells how to send one."""
    for path in NEED_NONE:
        assert (await ask(locked, path)).status_code == 200, path
    for path in NOT_OFFERED:
        if path != "/predict":  # it is Ultralytics', unless it has JSON
            assert json(await ask(locked, path), 404)["code"] == "not_offered"


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("/health/models", "GET /models"),
        ("/v1/models/tiny/test", "POST /predict/{model}"),
        ("/cvat/api/functions/tiny", "cvat-cli"),
        ("/label-studio/health", "clients/label-studio"),
        ("/persons/1/name", "POST /v1/vision/face/register names"),
        ("/clusters/albums", "GET /query/duplicates"),
    ],
)
async def test_path_that_is_not_offered_names_what_to_use(locked: Application, path: str, words: str) -> None:
    assert words in json(await ask(locked, path), 404)["detail"]


async def test_every_other_route_needs_a_key(locked: Application) -> None:
    """A route that is added later must not be open by mistake."""
    others = ("/docs", "/page-assets", "/v1/page-assets", *(f"/{name}/" for name in DIALECTS))
    paths = {path.replace("tiny", "{model:str}") for path in NEED_DETECT + NEED_ADMIN + NEED_HEALTH + NEED_NONE + NOT_OFFERED}
    found = {route.path for route in routes_of(locked)}
    assert {path for path in found if not path.startswith(others)} == {path for path in paths if not path.startswith(others)}


async def test_every_route_of_a_dialect_needs_a_key(locked: Application) -> None:
    async with calling(locked) as client:
        for dialect in load(DIALECTS):
            for handler in dialect.handlers:
                for path in handler.paths:
                    sample = f"/{dialect.name}{path}".replace("{version:int}", "1").replace("{model:str}", "tiny")
                    for method in handler.http_methods - {"OPTIONS"}:
                        response = await client.request(method, sample.replace("{name:str}", "tiny"), json={"image": "AAAA"})

                        assert (response.status_code in {400, 401}) == (sample not in OPEN), (method, sample, response.text)


@pytest.mark.parametrize("headers", [("Authorization", "Bearer {}"), ("authorization", "bearer  {}"), ("X-API-Key", "{}")])
async def test_key_opens_the_routes_of_its_scope(locked: Application, headers: tuple[str, str]) -> None:
    name, value = headers
    for path in NEED_DETECT:
        response = await ask(locked, path, {name: value.format(DETECT)})
        assert response.status_code in {200, 400, 404, 415, 502}  # 400: no classifier; 404: not listed; 502: Triton answers nothing
    for path in NEED_HEALTH:
        assert (await ask(locked, path, {name: value.format(HEALTH)})).status_code == 200


async def test_key_without_the_scope_is_forbidden(locked: Application) -> None:
    for path in NEED_HEALTH:
        problem = json(await ask(locked, path, {"X-API-Key": DETECT}), 403)
        assert problem["code"] == "forbidden"
        assert problem["detail"].startswith("the API key does not have the scope 'health';")
    for path in NEED_DETECT:
        assert json(await ask(locked, path, {"X-API-Key": HEALTH}), 403)["code"] == "forbidden"


async def test_wrong_malformed_and_repeated_keys_are_unauthorized(locked: Application, monkeypatch: pytest.MonkeyPatch) -> None:
    log = captured_log(monkeypatch, middleware)
    key, bearer = ("X-API-Key", DETECT), ("Authorization", f"Bearer {DETECT}")
    for headers in (
        *([("X-API-Key", wrong)] for wrong in ("", "camera.wrong", f"monitor.{SECRET}", f"Bearer {DETECT}", DETECT + "\xff")),
        *([("Authorization", wrong)] for wrong in (DETECT, "Bearer", f"Basic {DETECT}", f"Bearer {DETECT}, Bearer {DETECT}")),
        *([key, key], [key, bearer], [bearer, bearer]),
    ):
        reply = await call(locked, receiving(chunk(b"x")), "/detect", headers)

        assert (reply.status, reply.problem["code"], reply.headers["www-authenticate"]) == (401, "unauthorized", "Bearer")
        assert "key" not in log[-1].kwargs


async def test_log_has_the_id_of_the_key_and_never_its_secret(locked: Application, monkeypatch: pytest.MonkeyPatch) -> None:
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


PROXIES = (ip_network("10.0.0.0/8"), ip_network("2001:db8::/32"))
UNIX = ("", "0")
"""What the server says of a connection to its unix socket."""


@pytest.mark.parametrize(
    ("peer", "named", "address"),
    [
        *((peer, "192.0.2.7", "192.0.2.7") for peer in (UNIX, None, ("10.1.2.3", 1), ("::ffff:10.1.2.3", 1))),
        (("2001:db8::1", 1), "2001:db8:1::7", "2001:db8:1::7"),
        # A peer that is not trusted cannot name another client.
        *(((peer, 1), "192.0.2.7", peer) for peer in ("192.0.2.1", "::1", "::ffff:192.0.2.1")),
        # Without an address the connection counts.
        *((("10.1.2.3", 1), named, "10.1.2.3") for named in (None, "", "192.0.2.7, 10.0.0.1", "192.0.2.7:80", "\xe4", "<script>")),
        (UNIX, "unknown", ""),
    ],
)
def test_trusted_proxy_names_the_client(peer: Any, named: str | None, address: str) -> None:  # noqa: ANN401
    headers = {} if named is None else {b"x-real-ip": named.encode("latin-1")}
    assert client_address({"client": peer}, headers, PROXIES) == address  # type: ignore[typeddict-item]
