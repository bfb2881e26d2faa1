"""The OpenAPI document, and the page that shows it."""

import re
from typing import Any

import httpx
import pytest

from tests.support import json
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


async def test_page_needs_no_other_server(reader: httpx.AsyncClient) -> None:
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
