"""The OpenAPI document."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from app import __version__
from app.api.parameters.tasks import DetectParameters
from app.main import create_app
from tests.api.conftest import settings_for, write_keys
from tests.support import json, started
from tests.tools import openapi

SIGHT = {
    *("/analyze", "/analyze/batch", "/ocr/predict", "/ocr/batch", "/faces/detect", "/faces/recognize", "/faces/verify"),
    *("/embed/image", "/embed/batch", "/embed/boxes", "/embed/text"),
}
"""The routes for text, faces, vectors, and several questions about an image."""


@pytest.fixture(scope="module")
async def document(reader: httpx.AsyncClient) -> Any:  # noqa: ANN401
    return json(await reader.get("/docs/openapi.json"))


@pytest.fixture
async def document_with_keys(tmp_path: Path) -> Any:  # noqa: ANN401
    keys = write_keys(tmp_path, ("camera-1", "secret", "detect"))
    async with started(create_app(settings_for("127.0.0.1:1", api_keys_file=keys))) as client:
        return json(await client.get("/docs/openapi.json"))


async def test_the_document_describes_detection(document: Any) -> None:  # noqa: ANN401
    operation = document["paths"]["/detect"]["post"]

    assert document["openapi"].startswith("3.1")
    assert {"image/jpeg", "application/octet-stream", "multipart/form-data", "application/json"} <= set(
        operation["requestBody"]["content"]
    )
    assert "image" in operation["requestBody"]["content"]["multipart/form-data"]["schema"]["properties"]
    parameters = {parameter["name"]: parameter["schema"] for parameter in operation["parameters"]}
    assert set(parameters) == set(DetectParameters.__struct_fields__)
    assert parameters["confidence"]["maximum"] == parameters["iou"]["maximum"] == 1
    assert parameters["agnostic"]["type"] == "boolean"
    assert parameters["boxes"]["enum"] == ["coco", "cxcywh", "normalized", "pixel"]
    assert parameters["format"]["enum"] == ["coco-results", "image", "image_and_json", "json"]
    statuses = "200 400 404 406 408 413 415 422 424 429 500 502 503 504"
    assert set(operation["responses"]) == set(statuses.split())
    assert "application/problem+json" in operation["responses"]["422"]["content"]


async def test_every_operation_has_one_tag_which_is_described(document: Any, document_with_keys: Any) -> None:  # noqa: ANN401
    for each in (document, document_with_keys):
        described = {tag["name"] for tag in each["tags"] if tag["description"]}
        for path, operations in each["paths"].items():
            for operation in operations.values():
                (tag,) = operation["tags"]
                assert tag in described, path


async def test_every_type_of_a_result_is_described(document: Any) -> None:  # noqa: ANN401
    for path, kinds in {"/detect": ["object", "array"], "/predict/{model}": ["object", "array", "object", "object"]}.items():
        content = document["paths"][path]["post"]["responses"]["200"]["content"]
        assert list(content) == ["application/json", "image/jpeg", "image/png"]
        assert [kind.get("type", "object") for kind in content["application/json"]["schema"]["oneOf"]] == kinds
        assert content["image/png"]["schema"]["format"] == "binary"
    assert list(document["paths"]["/"]["get"]["responses"]["200"]["content"]) == ["application/json", "text/html"]


async def test_the_document_describes_batches(document: Any) -> None:  # noqa: ANN401
    operation = document["paths"]["/detect/batch"]["post"]
    content = operation["requestBody"]["content"]

    assert set(content) == {"multipart/form-data", "application/json"}
    for kind in content.values():
        images = kind["schema"]["properties"]["images"]
        assert (images["type"], images["minItems"], images["maxItems"]) == ("array", 1, 64)
    assert set(operation["responses"]["200"]["content"]) == {"application/json", "application/x-ndjson"}
    result = operation["responses"]["200"]["content"]["application/json"]["schema"]
    assert [kind.get("type", "object") for kind in result["oneOf"]] == ["object", "array"]
    of_detect = document["paths"]["/detect"]["post"]["parameters"]
    given = {parameter["name"]: parameter for parameter in operation["parameters"]}
    assert {"url", "image_id"} == {parameter["name"] for parameter in of_detect} - set(given)
    assert all(
        given[parameter["name"]] == parameter for parameter in of_detect if parameter["name"] not in {"url", "image_id", "format"}
    )
    assert given["format"]["schema"]["enum"] == ["coco-results", "json"]
    assert "image_id" in given["image_ids"]["schema"]["description"]


async def test_the_file_of_a_model_is_described(document_with_keys: Any) -> None:  # noqa: ANN401
    operation = document_with_keys["paths"]["/models/{model}"]["post"]
    content = operation["requestBody"]["content"]
    form = content["multipart/form-data"]["schema"]
    query = {parameter["name"]: parameter["schema"] for parameter in operation["parameters"] if parameter["in"] == "query"}

    assert operation["requestBody"]["required"]
    assert content["application/octet-stream"]["schema"]["format"] == "binary"
    assert form["required"] == ["file"]
    assert form["properties"]["file"]["format"] == "binary"
    assert {name: schema for name, schema in form["properties"].items() if name != "file"} == query
    assert {"labels", "head", "size", "licence"} < query.keys()
    assert not {"floor", "multi_label"} & query.keys()


def test_the_file_is_up_to_date() -> None:
    """A change of the API is seen in its review."""
    assert openapi.FILE.read_text(encoding="utf-8") == openapi.render(), "the API has changed: run ./just openapi"


async def test_every_parameter_is_described(document: Any) -> None:  # noqa: ANN401
    operation = document["paths"]["/detect"]["post"]
    content = operation["requestBody"]["content"]
    query = {parameter["name"]: parameter for parameter in operation["parameters"]}

    for name in DetectParameters.__struct_fields__:
        assert query[name]["in"] == "query"
        assert not query[name]["required"]
        assert query[name]["schema"]["description"]
        for kind in ("multipart/form-data", "application/json"):
            assert content[kind]["schema"]["properties"][name] == query[name]["schema"]
    assert (query["confidence"]["schema"]["type"], query["confidence"]["schema"]["default"]) == ("number", 0.25)
    assert (query["max_detections"]["schema"]["type"], query["max_detections"]["schema"]["maximum"]) == ("integer", 300)
    assert query["classes"]["schema"]["type"] == query["boxes"]["schema"]["type"] == "string"


async def test_each_task_has_its_own_parameters_and_answers(document: Any) -> None:  # noqa: ANN401
    described = {
        path: {parameter["name"]: parameter["schema"] for parameter in operations["post"]["parameters"]}
        for path, operations in document["paths"].items()
        if "post" in operations
    }

    shared = {"model", "version", "url", "timeout_ms", "truncated", "format"}
    assert set(described["/classify"]) == {*shared, "top_k", "confidence"}
    assert (described["/classify"]["top_k"]["maximum"], described["/classify"]["confidence"]["default"]) == (1000, 0.0)
    assert set(described["/embed/image"]) == {*shared, "use_cache", "index", "image_id"}
    of_each = (set(described[path]) for path in ("/segment", "/classify", "/embed/image"))
    assert set(described["/predict/{model}"]) == set().union(*of_each)
    in_path = [one["in"] for one in document["paths"]["/predict/{model}"]["post"]["parameters"] if one["name"] == "model"]
    assert in_path == ["path"]
    assert "default" not in described["/predict/{model}"]["confidence"]
    assert described["/classify"]["format"]["enum"] == ["json"]
    assert described["/predict/{model}"]["format"]["description"].endswith("For classes: `json`. For a vector: `json`.")
    for text in ("none below 0.05. Default: 0.25.", "of a class. Default: 0.0."):
        assert text in described["/predict/{model}"]["confidence"]["description"]
    assert set(described["/segment"]) - set(described["/detect"]) == {"masks"}
    answers = {
        path: document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"] for path in described
    }
    assert answers["/predict/{model}"] == {"oneOf": [*answers["/detect"]["oneOf"], answers["/classify"], answers["/embed/image"]]}


async def test_every_route_is_described_once(document: Any) -> None:  # noqa: ANN401
    assert set(document["paths"]) == {
        *("/", "/detect", "/detect/batch", "/classify", "/predict/{model}", "/models", "/models/{model}", "/routes"),
        *("/segment", "/segment/batch", "/pose", "/pose/batch", "/obb", "/obb/batch"),
        *SIGHT,
        *("/health", "/live", "/livez", "/livez/triton", "/ready", "/readyz"),
    }
    assert document["info"]["version"] == __version__
    for path in document["paths"].values():
        for operation in path.values():
            assert operation["summary"]


async def test_an_unavailable_gateway_is_described(document: Any) -> None:  # noqa: ANN401
    for path in ("/models", "/health", "/ready", "/readyz"):
        assert "503" in document["paths"][path]["get"]["responses"]
    for path in ("/", "/live", "/livez"):
        assert "503" not in document["paths"][path]["get"]["responses"]


async def test_keys_are_described_where_they_are_needed(document: Any, document_with_keys: Any) -> None:  # noqa: ANN401
    needed = {
        f"{path} of admin" if path == "/models/{model}" and method != "get" else path: operation.get("security")
        for path, operations in document_with_keys["paths"].items()
        for method, operation in operations.items()
    }

    def both(scope: str) -> list[dict[str, list[str]]]:
        return [{"bearer": [scope]}, {"header": [scope]}]

    schemes = document_with_keys["components"]["securitySchemes"]
    assert (schemes["bearer"]["type"], schemes["bearer"]["scheme"]) == ("http", "bearer")
    assert (schemes["header"]["type"], schemes["header"]["in"], schemes["header"]["name"]) == ("apiKey", "header", "X-API-Key")
    assert needed == {
        "/detect": both("detect"),
        "/detect/batch": both("detect"),
        "/classify": both("detect"),
        **{f"/{task}{rest}": both("detect") for task in ("segment", "pose", "obb") for rest in ("", "/batch")},
        **dict.fromkeys(SIGHT, both("detect")),
        "/predict/{model}": both("detect"),
        "/models": both("detect"),
        "/models/{model}": both("detect"),
        "/models/{model} of admin": both("admin"),
        "/routes": both("detect"),
        "/routes/{name}": both("admin"),
        "/models/{model}/load": both("admin"),
        "/models/{model}/unload": both("admin"),
        "/models/{model}/default-version": both("admin"),
        "/health": both("health"),
        "/ready": both("health"),
        "/readyz": None,
        "/live": None,
        "/livez": None,
        "/livez/triton": None,
        "/": None,
    }
    assert "security" not in repr(document)
