"""What is said at paths of OpenProcessor and Nuclio, and of backends of Label Studio, that the gateway does not have."""

import httpx
import pytest

from tests.support import json

ADVICE = {
    "GET /connection_pool_info": "GET /health",
    "GET /health/models": "GET /models",
    "POST /models/tiny/export": "POST /models/{model}",
    "GET /models/tiny/status": "GET /models/{model}",
    "POST /models/tiny/test": "POST /predict/{model}",
    "GET /api/functions": "cvat-cli",
    "GET /cvat/api/functions/tiny": "cvat-cli",
    "POST /api/function_invocations": "cvat-cli",
    **dict.fromkeys(
        ("POST /setup", "GET /versions", "POST /webhook", "GET /label-studio/health", "POST /label-studio/predict"),
        "clients/label-studio",
    ),
    **dict.fromkeys(
        (
            "GET /persons",
            "POST /persons/cluster",
            "GET /persons/1",
            "PUT /persons/1/name",
            "POST /persons/merge",
            "DELETE /persons/1",
        ),
        "POST /v1/vision/face/register names",
    ),
    **dict.fromkeys(
        ("POST /clusters/train/global", "POST /clusters/assign/faces", "GET /clusters/stats/global", "GET /clusters/global/0"),
        "POST /search/image finds",
    ),
    **dict.fromkeys(("GET /clusters/albums", "POST /clusters/rebalance/global"), "GET /query/duplicates"),
}


@pytest.mark.parametrize("prefix", ["", "/v1"])
@pytest.mark.parametrize("asked", ADVICE)
async def test_a_path_that_is_not_offered_names_what_to_use(lonely: httpx.AsyncClient, prefix: str, asked: str) -> None:
    method, path = asked.split()
    problem = json(await lonely.request(method, prefix + path), 404)
    assert problem["code"] == "not_offered"
    assert ADVICE[asked] in problem["detail"]
