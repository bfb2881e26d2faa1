"""The OpenAPI document and the page that shows it; what `/` is to browsers and to programs; and paths that do not exist."""

import re
from typing import Any

import httpx
import pytest

from app import __version__
from app.api.admission import middleware
from app.api.application import Application
from app.api.documentation.page.routes import ASSETS, FOLDER
from app.api.routes import UNMATCHED
from app.main import create_app
from app.model.heads import TASKS
from tests.api.conftest import routes_of, settings_for
from tests.support import SCENE, captured_log, json, started
from tests.tools import openapi

ADMIN = {"/routes/{name}", *(f"/models/{{model}}/{action}" for action in ("load", "unload", "default-version"))}
FREE = {"/", "/live", "/livez", "/livez/triton", "/readyz"}


@pytest.fixture(scope="module")
def document() -> Any:  # noqa: ANN401
    """With API keys, and with search."""
    return openapi.document()


def test_file_is_up_to_date() -> None:
    """A change of the API is seen in its review."""
    assert openapi.FILE.read_text(encoding="utf-8") == openapi.render(), "the API has changed: run ./just openapi"


async def test_keys_are_described_where_they_are_needed(document: Any, reader: httpx.AsyncClient) -> None:  # noqa: ANN401
    """A gateway without keys describes neither them nor what only they allow."""
    secured = {path: operations for path, operations in document["paths"].items() if path not in FREE}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            scopes = [next(iter(scheme.values())) for scheme in operation.get("security", ())]
            assert (len(scopes), len({*map(tuple, scopes)})) == ((2, 1) if path in secured else (0, 0)), (path, method)
            if path in ADMIN or (path == "/models/{model}" and method != "get"):
                assert scopes == [["admin"]] * 2, (path, method)
    assert [[*scheme.values()] for scheme in document["paths"]["/detect"]["post"]["security"]] == [[["detect"]]] * 2
    open_document = json(await reader.get("/docs/openapi.json"))

    assert "security" not in repr(open_document)
    assert not ADMIN & open_document["paths"].keys()
    assert open_document["paths"].keys() <= document["paths"].keys()
    assert open_document["paths"].keys() >= FREE


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


async def test_programs_get_a_description_of_the_service(shared_app: Application, reader: httpx.AsyncClient) -> None:
    response = await reader.get("/", headers={"Accept": "application/json, text/html"})
    description = json(response)
    endpoints = description.pop("endpoints")

    assert (response.headers["content-type"], response.headers["vary"]) == ("application/json", "Accept")
    routes = ["/detect", "/classify", "/segment", "/pose", "/obb", "/ocr/predict", "/ocr/predict", "/embed/image"]
    assert [endpoints[task] for task in TASKS] == routes
    assert set(endpoints.values()) <= {route.path_format for route in routes_of(shared_app)}
    assert (description["service"], description["status"], description["version"]) == ("Nereid", "running", __version__)
    assert description["api_versions"] == {"current": description["api_version"], "supported": ["v1"], "deprecated": []}
    assert [*description["models"]] == [*TASKS]
    assert description["models"]["detection"] == "tiny"
    assert description["backend"] == {"name": "triton", "gpu_available": False}


async def test_browsers_get_the_page(lonely: httpx.AsyncClient) -> None:
    response = await lonely.get("/", headers={"Accept": BROWSER})
    headers = response.headers

    assert (response.status_code, headers["content-type"], headers["vary"]) == (200, "text/html; charset=utf-8", "Accept")
    assert (headers["x-content-type-options"], headers["referrer-policy"]) == ("nosniff", "no-referrer")
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy.pop("img-src") == "'self' blob:"
    assert {policy.pop(name) for name in ("script-src", "style-src", "connect-src")} == {"'self'"}
    assert policy == dict.fromkeys(("default-src", "base-uri", "form-action", "frame-ancestors"), "'none'")
    assert not re.search(r"<style|style=|\bon\w+=|<script(?! type=\"module\" src=)", response.text)


async def test_files_of_the_page_are_served_and_no_others(reader: httpx.AsyncClient) -> None:
    for name, media_type in ASSETS.items():
        response = await reader.get(f"/page-assets/{name}")
        assert response.content == (FOLDER / name).read_bytes()
        assert (response.headers["content-type"], response.headers["x-content-type-options"]) == (media_type, "nosniff")
    for name in ("page.html", "nothing.js", "..%2Froutes.py"):
        assert (await reader.get(f"/page-assets/{name}")).status_code == 404


async def test_without_the_page_everybody_gets_the_description() -> None:
    async with started(create_app(settings_for("127.0.0.1:1", page=False))) as client:
        assert json(await client.get("/", headers={"Accept": BROWSER}))["service"] == "Nereid"
        assert (await client.get("/page-assets/page.js")).status_code == 404


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
