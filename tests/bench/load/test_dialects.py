"""Requests of dialects, and those of the gateway's own interface beside them."""

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


@pytest.mark.parametrize("name", [name for name in DIALECTS if name in PAIRS])
async def test_the_gateway_understands_them(server: httpx.AsyncClient, name: str) -> None:
    own, other = PAIRS[name](IMAGE, MODEL)
    answer = await server.post(own.path, content=own.body, headers=own.headers)
    response = await server.post(other.path, content=other.body, headers=other.headers)

    assert json(answer)["num_detections"] == 10
    assert response.status_code == 200
    assert "thing" in response.text
    assert max(response.text.count('"confidence"'), response.text.count('"score"')) >= 10
