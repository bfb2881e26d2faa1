"""The OpenAPI document and its page."""

import re

import httpx
import pytest

from tests.conftest import json


async def test_the_document_describes_detection(client: httpx.AsyncClient) -> None:
    """Raw and multipart bodies, every parameter and every error."""
    document = json(await client.get("/docs/openapi.json"))
    operation = document["paths"]["/detect"]["post"]

    assert document["openapi"].startswith("3.1")
    assert {"image/jpeg", "application/octet-stream", "multipart/form-data", "application/json"} <= set(
        operation["requestBody"]["content"]
    )
    assert operation["requestBody"]["content"]["multipart/form-data"]["schema"]["required"] == ["image"]
    parameters = {parameter["name"]: parameter["schema"] for parameter in operation["parameters"]}
    assert set(parameters) == {"model", "confidence", "classes", "max_detections", "boxes"}
    assert parameters["confidence"]["maximum"] == 1
    assert parameters["boxes"]["enum"] == ["coco", "normalized", "pixel"]
    assert set(operation["responses"]) == {"200", "400", "404", "413", "415", "422", "500", "502", "503", "504"}
    assert "application/problem+json" in operation["responses"]["422"]["content"]


async def test_a_model_in_the_path_is_no_parameter_of_the_query(client: httpx.AsyncClient) -> None:
    """It is described once."""
    document = json(await client.get("/docs/openapi.json"))
    parameters = document["paths"]["/predict/{model}"]["post"]["parameters"]

    assert [parameter["in"] for parameter in parameters if parameter["name"] == "model"] == ["path"]


async def test_the_page_needs_nobody_else(client: httpx.AsyncClient) -> None:
    """Every file that the page names is served here."""
    page = (await client.get("/docs")).text
    links = re.findall(r'(?:src|href)="([^"]+)"', page)

    assert len(links) >= 3
    assert not re.search(r"https?://", page.partition("<body>")[0])
    for link in links:
        if not link.startswith("data:"):
            assert len((await client.get(link)).content) > 10_000


@pytest.mark.parametrize("name", ["redoc.js", "__init__.py", "..%2Fsecret"])
async def test_only_the_files_of_the_page_are_served(client: httpx.AsyncClient, name: str) -> None:
    """What else lies in that folder is nobody's business."""
    assert (await client.get(f"/docs-assets/{name}")).status_code == 404
