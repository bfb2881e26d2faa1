"""The OpenAPI document and the page that shows it; what `/` is to browsers and to programs; and paths that do not exist."""

import re

import httpx

from app import __version__
from app.api.application import Application
from app.api.documentation.page.routes import ASSETS, FOLDER
from app.main import create_app
from tests.api.conftest import routes_of, settings_for
from tests.support import SCENE, json, started
from tests.tools import openapi


def test_file_is_up_to_date() -> None:
    """A change of the API is seen in its review."""
    assert openapi.FILE.read_text(encoding="utf-8") == openapi.render(), "the API has changed: run ./just openapi"


async def test_gateway_without_keys_describes_neither_them_nor_what_only_they_allow(reader: httpx.AsyncClient) -> None:
    with_keys = openapi.document()["paths"]
    without = json(await reader.get("/docs/openapi.json"))
    assert [[*scheme.values()] for scheme in with_keys["/detect"]["post"]["security"]] == [[["detect"]]] * 2
    assert "security" not in repr(without)
    assert "/detect" in without["paths"].keys() < with_keys.keys()
    assert {"/routes/{name}", "/models/{model}/load"} <= with_keys.keys() - without["paths"].keys()


async def test_documentation_works_below_the_prefix_of_a_trusted_proxy(reader: httpx.AsyncClient) -> None:
    async with started(create_app(settings_for("127.0.0.1:1", trusted_proxies="127.0.0.1"))) as behind:
        for client, sent, prefix in (
            (behind, "/vision/v2/", "/vision/v2"),
            *((behind, sent, "") for sent in ("", '/"><script>', "//evil.example", "vision")),
            (reader, "/vision", ""),
        ):
            headers = {"X-Forwarded-Prefix": sent}
            page, document = [await client.get(path, headers=headers) for path in ("/docs", "/docs/openapi.json")]
            assert re.findall(r'(?:src|href)="([^"]*)docs-assets', page.text) == [f"{prefix}/"] * 3
            assert json(document)["servers"] == [{"url": prefix or "/"}]


BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,*/*;q=0.8"


async def test_programs_get_a_description_of_the_service(shared_app: Application, reader: httpx.AsyncClient) -> None:
    response = await reader.get("/", headers={"Accept": "application/json, text/html"})
    description = json(response)
    endpoints = description["endpoints"]
    assert (response.headers["content-type"], response.headers["vary"]) == ("application/json", "Accept")
    assert [endpoints[task] for task in ("detection", "text_recognition")] == ["/detect", "/ocr/predict"]
    assert set(endpoints.values()) <= {route.path_format for route in routes_of(shared_app)}
    assert (description["service"], description["status"], description["version"]) == ("Nereid", "running", __version__)
    assert (description["models"]["detection"], description["backend"]["name"]) == ("tiny", "triton")


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


async def test_misspelt_path_is_recognised(reader: httpx.AsyncClient) -> None:
    for path, hint in (("/v1/detect/bach", "; did you mean /detect/batch?"), ("/" + "detect" * 150, ";")):
        problem = json(await reader.post(path, content=SCENE), 404)
        assert problem["detail"] == f"this path does not exist{hint} /docs lists those that do"


async def test_another_method_is_answered_with_the_right_one(reader: httpx.AsyncClient) -> None:
    """A person may have used `curl -T`, which sends PUT, or a browser."""
    for method, path, detail, allowed in (
        ("PUT", "/v1/predict/tiny", "PUT is not supported here: send the image with POST, for example with curl --data", "POST"),
        ("GET", "/detect/batch", "GET is not supported here: send the images with POST, for example with curl -F images=@", "POST"),
        ("POST", "/models", "POST is not supported here, but GET, HEAD, OPTIONS; /docs describes what each path supports", "GET"),
    ):
        response = await reader.request(method, path)
        assert response.status_code == 405
        assert f'"{detail}' in response.text
        assert allowed in response.headers["allow"]


async def test_path_that_is_not_offered_names_what_to_use(reader: httpx.AsyncClient) -> None:
    for asked, advice in (
        ("GET /connection_pool_info", "GET /health"),
        ("GET /v1/models/tiny/status", "GET /models/{model}"),
        ("GET /cvat/api/functions/tiny", "cvat-cli"),
        ("POST /setup", "clients/label-studio"),
    ):
        problem = json(await reader.request(*asked.split()), 404)
        assert (problem["code"], advice in problem["detail"]) == ("not_offered", True), asked
