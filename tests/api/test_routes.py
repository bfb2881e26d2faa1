"""Whose path a request has, and the name of its route."""

from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from litestar import get, post
from litestar.types import HTTPScope
from msgspec import to_builtins

from app.api.admission import middleware
from app.api.application import table_of
from app.api.dialects.dialect import Dialect, load
from app.api.routes import UNMATCHED, ModelRoute
from app.settings.schema import DIALECTS
from tests.support import SCENE, captured_log, json


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


@pytest.mark.parametrize(
    ("path", "dialects", "headers", "expected"),
    [
        *(
            (path, (ONE, OTHER), [], expected)
            for path, expected in (
                ("//status", "/one/status"),
                ("/one/status", "/one/status"),
                ("/yolo11n/3", "/other/yolo11n/3"),
                *(
                    (path, path)
                    for path in ("/yolo11n/1_0", "/yolo11n/\u0661", "/yolo11n/03", "/yolo11n/3/4", "/v1/detect", "//", "")
                ),
            )
        ),
        # The request tells two dialects with one path apart; the gateway may have a route for what none recognises.
        ("/predict", (ONE, OTHER), TYPED, "/one/predict"),
        ("/predict", (ONE, OTHER), [], "/other/predict"),
        ("/predict", (OTHER, ONE), TYPED, "/one/predict"),
        ("/predict", (ONE,), [], "/predict"),
    ],
)
def test_request_goes_to_the_dialect_that_has_its_path(
    path: str, dialects: Sequence[Dialect], headers: list[tuple[bytes, bytes]], expected: str
) -> None:
    scope: Any = {"type": "http", "path": path, "method": "POST", "headers": headers}
    found = table_of(dialects).find(scope)

    assert (path if found is None else found[0].prefix + scope["path"]) == expected


def test_dialects_with_one_path_tell_their_requests_apart() -> None:
    """Otherwise the first dialect would get all requests."""
    claims: dict[str, list[Dialect]] = {}
    for dialect in load(DIALECTS):
        for path in {path for handler in dialect.handlers for path in handler.paths}:
            claims.setdefault(path, []).append(dialect)

    assert [path for path, those in claims.items() if len(those) > 1 and any(path not in each.applies for each in those)] == []
    assert [dialect.name for dialect in load(DIALECTS)] == list(DIALECTS)


async def test_request_has_the_template_of_its_path(reader: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    log = captured_log(monkeypatch, middleware)
    for method, path, status_, route in (
        ("GET", "/v1/models/", 200, "/v1/models"),
        ("HEAD", "/livez", 200, "/livez"),
        ("OPTIONS", "/livez", 204, "/livez"),
        ("POST", "/v1/predict/tiny/", 200, "/v1/predict/{model}"),
        ("POST", "/detect?confidence=2", 400, "/detect"),
        ("GET", "/docs/nothing", 404, "/docs/{path}"),
        *(("GET", path, 404, UNMATCHED) for path in ("/nowhere", "/v2/detect", "/v1/docs")),
        ("POST", "/predict/", 200, "/ultralytics/predict"),
        ("PUT", "/v1/predict/tiny/", 405, "/v1/predict/{model}"),
    ):
        response = await reader.request(method, path, content=SCENE if method == "POST" else None)
        assert (response.status_code, log[-1].kwargs["route"]) == (status_, route), (method, path)


async def test_misspelt_path_is_recognised(reader: httpx.AsyncClient) -> None:
    for path, hint in (
        ("/detct", "; did you mean /detect?"),
        ("/v1/detect/bach", "; did you mean /detect/batch?"),
        ("/" + "detect" * 150, ";"),
    ):
        problem = json(await reader.post(path, content=SCENE), 404)
        assert problem["detail"] == f"this path does not exist{hint} /docs lists those that do"


async def test_another_method_is_answered_with_the_right_one(reader: httpx.AsyncClient) -> None:
    """A person may have used `curl -T`, which sends PUT, or a browser."""
    for method, path, detail, allowed in (
        ("PUT", "/v1/predict/tiny", "PUT is not supported here: send the image with POST, for example with curl --data", "POST"),
        ("GET", "/detect/batch", "GET is not supported here: send the images with POST, for example with curl -F images=@", "POST"),
        ("POST", "/models", "POST is not supported here, but GET, HEAD, OPTIONS; /docs describes what each path supports", "GET"),
        ("X" * 99, "/detect", f"{'X' * 16} is not supported here: send the image", "POST"),
    ):
        response = await reader.request(method, path)
        assert response.status_code == 405
        assert f'"{detail}' in response.text
        assert allowed in response.headers["allow"]


async def test_path_that_is_not_offered_names_what_to_use(reader: httpx.AsyncClient) -> None:
    for asked, advice in (
        ("GET /connection_pool_info", "GET /health"),
        ("POST /models/tiny/export", "POST /models/{model}"),
        ("GET /v1/models/tiny/status", "GET /models/{model}"),
        ("POST /models/tiny/test", "POST /predict/{model}"),
        ("GET /cvat/api/functions/tiny", "cvat-cli"),
        ("POST /setup", "clients/label-studio"),
        ("PUT /v1/persons/1/name", "POST /v1/vision/face/register names"),
        ("GET /clusters/albums", "GET /query/duplicates"),
    ):
        problem = json(await reader.request(*asked.split()), 404)
        assert (problem["code"], advice in problem["detail"]) == ("not_offered", True), asked
