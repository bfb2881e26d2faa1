"""Whose path a request has, and the name of its route."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from litestar import get, post
from litestar.enums import ScopeType
from litestar.types import HTTPScope, Receive, Scope, Send
from msgspec import to_builtins

from app.api.application import Application, table_of
from app.api.dialects.dialect import Dialect, load
from app.api.routes import UNMATCHED, ModelRoute, route_of
from app.settings.schema import DIALECTS
from tests.support import SCENE, calling, json


@get("/status")
async def status() -> None: ...


@post("/predict")
async def predict() -> None: ...


@ModelRoute("/{model:str}/{version:int}")
async def versioned() -> None: ...


def is_json(scope: HTTPScope) -> bool:
    return (b"content-type", b"application/json") in scope["headers"]


ONE = Dialect("one", [status, predict], to_builtins, applies={"/predict": is_json})
OTHER = Dialect("other", [predict, versioned], to_builtins, applies={"/predict": lambda scope: not is_json(scope)})
TYPED = [(b"content-type", b"application/json")]


def path_of(path: str, dialects: Sequence[Dialect] = (ONE, OTHER), headers: Sequence[tuple[bytes, bytes]] = ()) -> str:
    scope: Any = {"type": "http", "path": path, "method": "POST", "headers": list(headers)}
    found = table_of(dialects).find(scope)
    return path if found is None else found[0].prefix + scope["path"]


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/status", "/one/status"),
        ("/status/", "/one/status"),
        ("/one/status", "/one/status"),
        ("/yolo11n/3", "/other/yolo11n/3"),
        ("/yolo11n/three", "/yolo11n/three"),
        ("/yolo11n/1_0", "/yolo11n/1_0"),
        ("/yolo11n/\u0661", "/yolo11n/\u0661"),
        ("/yolo11n/3/4", "/yolo11n/3/4"),
        ("/detect", "/detect"),
        ("/v1/detect", "/v1/detect"),
        ("/", "/"),
        ("//", "//"),
        ("//status", "/one/status"),
        ("/yolo11n/03", "/yolo11n/03"),
        ("", ""),
    ],
)
def test_a_request_goes_to_the_dialect_that_has_its_path(path: str, expected: str) -> None:
    assert path_of(path) == expected


def test_the_request_tells_two_dialects_with_one_path_apart() -> None:
    assert path_of("/predict", headers=TYPED) == "/one/predict"
    assert path_of("/predict") == "/other/predict"
    assert path_of("/predict", (OTHER, ONE), TYPED) == "/one/predict"


def test_a_request_that_no_dialect_recognises_stays_where_it_is() -> None:
    """The gateway may have a route for it."""
    assert path_of("/predict", [ONE]) == "/predict"


def test_each_name_is_that_of_a_dialect() -> None:
    assert [dialect.name for dialect in load(DIALECTS)] == list(DIALECTS)


def test_dialects_with_one_path_tell_their_requests_apart() -> None:
    """Otherwise the first dialect would get all requests."""
    claims: dict[str, list[Dialect]] = {}
    for dialect in load(DIALECTS):
        for path in {path for handler in dialect.handlers for path in handler.paths}:
            claims.setdefault(path, []).append(dialect)

    assert [
        path for path, dialects in claims.items() if len(dialects) > 1 and any(path not in one.applies for one in dialects)
    ] == []


def watched(app: Application, routes: list[str]) -> Application:

    async def watch(scope: Scope, receive: Receive, send: Send) -> None:
        await app(scope, receive, send)
        if scope["type"] == ScopeType.HTTP:
            routes.append(route_of(scope))

    return watch


@pytest.mark.parametrize(
    ("method", "path", "status", "route"),
    [
        ("GET", "/livez", 200, "/livez"),
        ("HEAD", "/livez", 200, "/livez"),
        ("OPTIONS", "/livez", 204, "/livez"),
        ("GET", "/v1/models/", 200, "/v1/models"),
        ("GET", "/v1/readyz", 200, "/v1/readyz"),
        ("GET", "/health", 200, "/health"),
        ("POST", "/v1/detect", 200, "/v1/detect"),
        ("POST", "/predict/tiny", 200, "/predict/{model}"),
        ("POST", "/v1/predict/tiny/", 200, "/v1/predict/{model}"),
        ("POST", "/detect?model=tiny", 200, "/detect"),
        ("POST", "/detect?confidence=2", 400, "/detect"),
        ("GET", "/docs", 200, "/docs"),
        ("GET", "/docs/openapi.json", 200, "/docs/openapi.json"),
        ("GET", "/docs/nothing", 404, "/docs/{path}"),
        ("GET", "/docs-assets/nothing", 404, "/docs-assets/{name}"),
        ("GET", "/", 200, "/"),
        ("GET", "/page-assets/nothing", 404, "/page-assets/{name}"),
        ("GET", "/nowhere", 404, UNMATCHED),
        ("GET", "/v2/detect", 404, UNMATCHED),
        ("GET", "/schema", 404, UNMATCHED),
        ("POST", "/predict/", 200, "/ultralytics/predict"),
        ("POST", "/predict/a/b", 404, UNMATCHED),
        ("GET", "/v1/docs", 404, UNMATCHED),
        ("POST", "/livez", 405, "/livez"),
        ("FROBNICATE", "/livez", 405, "/livez"),
        ("GET", "/detect", 405, "/detect"),
        ("HEAD", "/predict/tiny", 405, "/predict/{model}"),
        ("PUT", "/v1/predict/tiny/", 405, "/v1/predict/{model}"),
    ],
)
async def test_a_request_has_the_template_of_its_path(
    shared_app: Application, method: str, path: str, status: int, route: str
) -> None:
    routes: list[str] = []
    async with calling(watched(shared_app, routes)) as client:
        response = await client.request(method, path, content=SCENE if method == "POST" else None)

    assert (response.status_code, routes) == (status, [route])


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/detct", "; did you mean /detect?"),
        ("/detect/bach", "; did you mean /detect/batch?"),
        ("/healthz", "; did you mean /health?"),
    ],
)
async def test_a_misspelt_path_is_recognised(reader: httpx.AsyncClient, prefix: str, path: str, hint: str) -> None:
    problem = json(await reader.post(prefix + path, content=SCENE), 404)

    assert problem["detail"] == f"this path does not exist{hint} /docs lists those that do"


async def test_only_a_similar_path_is_suggested(reader: httpx.AsyncClient) -> None:
    for path in ("/nowhere", "/" + "detect" * 150):
        assert json(await reader.get(path), 404)["detail"] == "this path does not exist; /docs lists those that do"


@pytest.mark.parametrize(
    ("method", "path", "detail"),
    [
        ("PUT", "/detect", "PUT is not supported here: send the image with POST, for example with curl --data-binary @image.jpg"),
        ("GET", "/v1/predict/tiny", "GET is not supported here: send the image with POST, for example with curl --data-binary @"),
        (
            "GET",
            "/detect/batch",
            "GET is not supported here: send the images with POST, for example with curl -F images=@first.jpg",
        ),
        ("POST", "/models", "POST is not supported here, but GET, HEAD, OPTIONS; /docs describes what each path supports"),
        ("GET", "/nim/v1/infer", "GET is not supported here, but "),
        ("X" * 99, "/detect", f"{'X' * 16} is not supported here: send the image"),
    ],
)
async def test_another_method_is_answered_with_the_right_one(
    reader: httpx.AsyncClient, method: str, path: str, detail: str
) -> None:
    """A person may have used `curl -T`, which sends PUT, or a browser."""
    response = await reader.request(method, path)

    assert response.status_code == 405
    assert f'"{detail}' in response.text
    assert "GET" in response.headers["allow"] if path == "/models" else "POST" in response.headers["allow"]
