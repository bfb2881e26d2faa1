"""The OpenAPI document."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from app import __version__
from app.api.parameters import Parameters
from app.main import create_app
from tests.api.conftest import settings_for
from tests.support import json, started


@pytest.fixture
async def document(lonely: httpx.AsyncClient) -> Any:  # noqa: ANN401
    return json(await lonely.get("/docs/openapi.json"))


async def test_the_document_describes_detection(document: Any) -> None:  # noqa: ANN401
    """Raw and multipart bodies, every parameter and every error."""
    operation = document["paths"]["/detect"]["post"]

    assert document["openapi"].startswith("3.1")
    assert {"image/jpeg", "application/octet-stream", "multipart/form-data", "application/json"} <= set(
        operation["requestBody"]["content"]
    )
    assert operation["requestBody"]["content"]["multipart/form-data"]["schema"]["required"] == ["image"]
    parameters = {parameter["name"]: parameter["schema"] for parameter in operation["parameters"]}
    assert set(parameters) == {"model", "confidence", "classes", "max_detections", "timeout_ms", "boxes"}
    assert parameters["confidence"]["maximum"] == 1
    assert parameters["boxes"]["enum"] == ["coco", "normalized", "pixel"]
    assert set(operation["responses"]) == {"200", "400", "404", "408", "413", "415", "422", "429", "500", "502", "503", "504"}
    assert "application/problem+json" in operation["responses"]["422"]["content"]


async def test_every_parameter_is_described(document: Any) -> None:  # noqa: ANN401
    """Type, default and meaning are the same in the query, in a form and in JSON."""
    operation = document["paths"]["/detect"]["post"]
    content = operation["requestBody"]["content"]
    query = {parameter["name"]: parameter for parameter in operation["parameters"]}

    for name in Parameters.__struct_fields__:
        assert query[name]["in"] == "query"
        assert not query[name]["required"]
        assert query[name]["schema"]["description"]
        for kind in ("multipart/form-data", "application/json"):
            assert content[kind]["schema"]["properties"][name] == query[name]["schema"]
    assert (query["confidence"]["schema"]["type"], query["confidence"]["schema"]["default"]) == ("number", 0.25)
    assert (query["max_detections"]["schema"]["type"], query["max_detections"]["schema"]["maximum"]) == ("integer", 300)
    assert query["classes"]["schema"]["type"] == query["boxes"]["schema"]["type"] == "string"


async def test_a_model_in_the_path_is_not_a_parameter_of_the_query(document: Any) -> None:  # noqa: ANN401
    """It is described once."""
    parameters = document["paths"]["/predict/{model}"]["post"]["parameters"]

    assert [parameter["in"] for parameter in parameters if parameter["name"] == "model"] == ["path"]


async def test_every_route_is_described_once(document: Any) -> None:  # noqa: ANN401
    """The description has neither the version prefix nor the files of the page."""
    assert set(document["paths"]) == {
        *("/", "/detect", "/predict/{model}", "/models"),
        *("/health", "/live", "/livez", "/ready", "/readyz"),
    }
    assert document["info"]["version"] == __version__
    for path in document["paths"].values():
        for operation in path.values():
            assert operation["summary"]


async def test_an_unavailable_gateway_is_described(document: Any) -> None:  # noqa: ANN401
    """Every route that asks Triton may answer with 503."""
    for path in ("/models", "/health", "/ready", "/readyz"):
        assert "503" in document["paths"][path]["get"]["responses"]
    for path in ("/", "/live", "/livez"):
        assert "503" not in document["paths"][path]["get"]["responses"]


async def test_keys_are_described_where_they_are_needed(document: Any, tmp_path: Path) -> None:  # noqa: ANN401
    """Every route that needs a key names both ways to send it and the scope; without a file of keys none is mentioned."""
    (path := tmp_path / "keys.toml").touch()
    async with started(create_app(settings_for("127.0.0.1:1", api_keys_file=str(path)))) as client:
        with_keys = json(await client.get("/docs/openapi.json"))
    needed = {
        path: operation.get("security") for path, operations in with_keys["paths"].items() for operation in operations.values()
    }

    def both(scope: str) -> list[dict[str, list[str]]]:
        return [{"bearer": [scope]}, {"header": [scope]}]

    schemes = with_keys["components"]["securitySchemes"]
    assert (schemes["bearer"]["type"], schemes["bearer"]["scheme"]) == ("http", "bearer")
    assert (schemes["header"]["type"], schemes["header"]["in"], schemes["header"]["name"]) == ("apiKey", "header", "X-API-Key")
    assert needed == {
        "/detect": both("detect"),
        "/predict/{model}": both("detect"),
        "/models": both("detect"),
        "/health": both("health"),
        "/ready": both("health"),
        "/readyz": None,
        "/live": None,
        "/livez": None,
        "/": None,
    }
    assert "security" not in repr(document)
