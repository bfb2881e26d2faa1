"""Requests of dialects, and those of the gateway's own interface beside them."""

import base64
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from app.main import create_app
from app.settings.schema import DIALECTS
from bench.harness.triton import Triton
from bench.load.dialects import PAIRS
from tests.support import json, sample_image, started

IMAGE = sample_image("coffee.jpg")
MODEL = "objects_file"


@pytest.fixture(scope="module")
async def server(fixtures: Triton) -> AsyncIterator[httpx.AsyncClient]:
    """The gateway with the model that finds ten objects."""
    settings = msgspec.structs.replace(fixtures.settings, model=MODEL, log_level="error")
    async with started(create_app(settings)) as client:
        yield client


@pytest.mark.parametrize("name", PAIRS)
def test_both_requests_carry_the_image_in_the_same_way(name: str) -> None:
    """As it is in forms, in base64 in JSON, so that what they cost differs by the dialect only."""
    own, other = PAIRS[name](IMAGE, MODEL)
    carried = IMAGE if own.headers["content-type"].startswith("multipart/form-data") else base64.b64encode(IMAGE)

    assert own.path == "/detect" != other.path
    assert own.headers["content-type"].partition(";")[0] == other.headers["content-type"].partition(";")[0]
    for request in (own, other):
        assert request.body.count(carried) == 1
        assert len(request.body) < len(carried) + 1000
        assert request.headers["content-length"] == str(len(request.body))


@pytest.mark.parametrize("name", [name for name in DIALECTS if name in PAIRS])
async def test_the_gateway_understands_them(server: httpx.AsyncClient, name: str) -> None:
    own, other = PAIRS[name](IMAGE, MODEL)
    answer = await server.post(own.path, content=own.body, headers=own.headers)
    response = await server.post(other.path, content=other.body, headers=other.headers)

    assert json(answer)["num_detections"] == 10
    assert response.status_code == 200
    assert "thing" in response.text
    assert max(response.text.count('"confidence"'), response.text.count('"score"')) >= 10
