"""The OpenAPI document and the page that shows it; and what `/` is to browsers and to programs."""

import re
from typing import Any

import httpx
import pytest

from app import __version__
from app.api.application import Application
from app.api.documentation.page.routes import ASSETS, FOLDER
from app.main import create_app
from app.model.heads import TASKS
from tests.api.conftest import routes_of, settings_for
from tests.fakes.triton import CONFIG, FakeTriton, serving
from tests.support import IMAGES, json, started
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


def test_operations_and_parameters_are_described(document: Any) -> None:  # noqa: ANN401
    tags = {tag["name"] for tag in document["tags"] if tag["description"]}
    for path, operations in document["paths"].items():
        for method, operation in operations.items():
            (tag,) = operation["tags"]
            assert tag in tags or path.startswith(("/ingest", "/query", "/search", "/ocr", "/faces")), path
            assert operation["summary"], path
            for parameter in operation.get("parameters", ()) if method == "post" else ():
                assert parameter["in"] == "path" or parameter["schema"].get("description"), (path, parameter["name"])


def test_parameters_in_the_body_are_those_of_the_query(document: Any) -> None:  # noqa: ANN401
    for path in ("/detect", "/models/{model}"):
        operation = document["paths"][path]["post"]
        query = {parameter["name"]: parameter["schema"] for parameter in operation["parameters"] if parameter["in"] == "query"}
        for content_type in ("multipart/form-data", "application/json"):
            if content_type in operation["requestBody"]["content"]:
                fields = operation["requestBody"]["content"][content_type]["schema"]["properties"]
                assert {name: schema for name, schema in fields.items() if name not in {"image", "file"}} == query


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


async def test_documentation_needs_no_other_server(reader: httpx.AsyncClient) -> None:
    page = (await reader.get("/docs")).text
    links = re.findall(r'(?:src|href)="([^"]+)"', page)

    assert len(links) >= 3
    assert not re.search(r"https?://", page.partition("<body>")[0])
    for link in links:
        if not link.startswith("data:"):
            response = await reader.get(link)
            assert response.headers["content-type"].startswith("text/css" if link.endswith("css") else "text/javascript")
            assert "content-disposition" not in response.headers  # it is shown and not downloaded
            assert int(response.headers["content-length"]) == len(response.content) > 10_000
    for name in ("redoc.js", "__init__.py", "..%2Fsecret"):
        assert (await reader.get(f"/docs-assets/{name}")).status_code == 404


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


async def test_model_on_a_gpu_is_described() -> None:
    fake = FakeTriton()
    fake.config = {**CONFIG, "instance_group": [{"kind": "KIND_GPU"}]}
    async with serving(fake), started(create_app(settings_for(fake.url))) as client:
        assert json(await client.get("/"))["backend"]["gpu_available"] is True
        assert json(await client.get("/health"))["gpu"]["in_use"] is True


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
        assert response.headers["content-type"] == media_type
        assert response.headers["x-content-type-options"] == "nosniff"
        assert response.headers["cache-control"] == ("max-age=86400" if media_type.startswith("image/") else "no-cache")
    assert {path.name for path in FOLDER.iterdir()} == {*ASSETS, "page.html"}
    for name in ("page.html", "nothing.js", "__init__.py", "..%2Froutes.py"):
        assert (await reader.get(f"/page-assets/{name}")).status_code == 404


def test_page_names_its_own_files_only() -> None:
    """The licences of the samples are in tests/images/README.md."""
    named: set[str] = set()
    for path in FOLDER.glob("*.[hcj]*[ls]"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"https?://(?!www\.w3\.org/)|@import|\burl\(", text)
        named |= set(re.findall(r"page-assets/([\w.-]+)", text)) | set(re.findall(r'from "\./([\w.]+)"', text))

    assert named == {*ASSETS}
    for sample in FOLDER.glob("*.jpg"):
        assert sample.read_bytes() == (IMAGES / sample.name).read_bytes()


async def test_without_the_page_everybody_gets_the_description() -> None:
    async with started(create_app(settings_for("127.0.0.1:1", page=False))) as client:
        assert json(await client.get("/", headers={"Accept": BROWSER}))["service"] == "Nereid"
        assert (await client.get("/page-assets/page.js")).status_code == 404
