"""What is said at paths of OpenProcessor and Nuclio, and of backends of Label Studio, that the gateway does not have."""

import httpx
import pytest

from tests.support import json


@pytest.mark.parametrize(
    ("asked", "advice"),
    [
        ("GET /connection_pool_info", "GET /health"),
        ("GET /health/models", "GET /models"),
        ("POST /models/tiny/export", "POST /models/{model}"),
        ("GET /v1/models/tiny/status", "GET /models/{model}"),
        ("POST /models/tiny/test", "POST /predict/{model}"),
        ("GET /cvat/api/functions/tiny", "cvat-cli"),
        ("POST /api/function_invocations", "cvat-cli"),
        ("POST /setup", "clients/label-studio"),
        ("GET /label-studio/health", "clients/label-studio"),
        ("GET /persons", "POST /v1/vision/face/register names"),
        ("PUT /v1/persons/1/name", "POST /v1/vision/face/register names"),
        ("DELETE /persons/1", "POST /v1/vision/face/register names"),
        ("POST /clusters/train/global", "POST /search/image finds"),
        ("GET /clusters/albums", "GET /query/duplicates"),
    ],
)
async def test_path_that_is_not_offered_names_what_to_use(reader: httpx.AsyncClient, asked: str, advice: str) -> None:
    problem = json(await reader.request(*asked.split()), 404)

    assert (problem["code"], advice in problem["detail"]) == ("not_offered", True)
