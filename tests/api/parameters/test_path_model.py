"""A model in the path whose task Triton must tell: what holds while it is asked."""

import httpx

from tests.fakes.triton import FakeTriton
from tests.support import SCENE, json


async def test_parameters_of_the_query_hold_before_the_config_is_read(gateway: tuple[FakeTriton, httpx.AsyncClient]) -> None:
    fake, client = gateway
    fake.may_tell.clear()
    before = fake.config_reads
    for query in ("timeout_ms=soon", "version=0", "model=tiny"):
        assert json(await client.post(f"/predict/other?{query}", content=SCENE), 400)["code"] == "invalid_parameter"
    assert fake.config_reads == before
    problem = json(await client.post("/predict/other?timeout_ms=100", content=SCENE), 504)
    fake.may_tell.set()

    assert problem["code"] == "deadline_passed"
    assert fake.requests == []


async def test_only_the_version_of_the_query_is_asked_for(gateway: tuple[FakeTriton, httpx.AsyncClient]) -> None:
    """The newest version may no longer exist."""
    fake, client = gateway
    assert "top_k" in json(await client.post("/predict/other?version=1&top_k=1", content=SCENE), 400)["detail"]
    assert fake.requests == []
    await client.post("/predict/other?version=1", content=SCENE)

    assert fake.read_configs.count("other") == 1
    assert [(request.model_name, request.model_version) for request in fake.requests] == [("other", "1")]
