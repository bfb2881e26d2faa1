"""A model in the path whose task Triton must tell: what holds while it is asked."""

from collections.abc import AsyncIterator

import httpx
import pytest

from tests.fakes.triton import FakeTriton
from tests.support import SCENE, json

Gateway = tuple[FakeTriton, httpx.AsyncClient]


@pytest.fixture
async def silent(gateway: Gateway) -> AsyncIterator[Gateway]:
    fake, client = gateway
    fake.may_tell.clear()
    yield fake, client
    fake.may_tell.set()


async def test_the_deadline_of_the_query_holds(silent: Gateway) -> None:
    fake, client = silent
    problem = json(await client.post("/predict/other?timeout_ms=100", content=SCENE), 504)

    assert problem["code"] == "deadline_passed"
    assert fake.requests == []


async def test_only_the_version_of_the_query_is_asked_for(gateway: Gateway) -> None:
    """The newest version may no longer exist."""
    fake, client = gateway
    await client.post("/predict/other?version=1", content=SCENE)

    assert fake.read_configs.count("other") == 1
    assert [(request.model_name, request.model_version) for request in fake.requests] == [("other", "1")]


@pytest.mark.parametrize("query", ["timeout_ms=soon", "version=0", "model=tiny"])
async def test_parameters_invalid_for_every_task_are_rejected_before_the_config_is_read(silent: Gateway, query: str) -> None:
    fake, client = silent
    before = fake.config_reads

    assert json(await client.post(f"/predict/other?{query}", content=SCENE), 400)["code"] == "invalid_parameter"
    assert fake.config_reads == before


async def test_parameters_invalid_for_the_models_task_are_rejected_before_inference(gateway: Gateway) -> None:
    fake, client = gateway

    assert "top_k" in json(await client.post("/predict/other?top_k=1", content=SCENE), 400)["detail"]
    assert fake.requests == []
