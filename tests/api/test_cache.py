"""How the cache shows in HTTP: who gets a hit, in which form, and what the headers say about it."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from app.main import create_app
from tests.api.conftest import settings_for, write_keys
from tests.fakes.triton import FakeTriton, infer_response, serving
from tests.support import SCENE, started

OBJECTS = np.array([[2, 3, 20, 25, 0.9, 0], [10, 4, 30, 20, 0.4, 1]], np.float32)
UNCACHED = {"cache-control": "max-age=0, no-store"}


@pytest.fixture(autouse=True)
def known_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.zoo.fingerprint.read", lambda *_: b"network")


@asynccontextmanager
async def gateway(**settings: object) -> AsyncIterator[tuple[FakeTriton, httpx.AsyncClient]]:
    """A Triton whose model finds two objects, and a client of an application with a cache that knows the network."""
    fake = FakeTriton()
    fake.answer = infer_response(output0=OBJECTS)
    async with serving(fake), started(create_app(settings_for(fake.url, cache="memory", **settings))) as client:
        yield fake, client


async def until_hit(client: httpx.AsyncClient, url: str, **request: Any) -> httpx.Response:  # noqa: ANN401
    """Send a request until the cache answers it: results are stored, and networks read, in the background."""
    while (response := await client.post(url, **request)).headers.get("x-cache") != "hit":  # noqa: ASYNC110 - nobody tells
        await asyncio.sleep(0.01)
    return response


def found(response: httpx.Response) -> Any:  # noqa: ANN401
    """Return what an answer has found, without what differs between two requests."""
    assert response.status_code == 200, response.text
    if not isinstance(document := response.json() if "json" in response.headers["content-type"] else response.content, dict):
        return document
    return {name: part for name, part in document.items() if name not in {"total_time_ms", "request_id"}}


async def test_headers_tell_a_hit_and_a_request_can_rule_it_out() -> None:
    async with gateway() as (fake, client):
        hit = await until_hit(client, "/detect", content=SCENE)
        missed = await client.post("/detect", content=SCENE + b" ")
        count = len(fake.requests)
        uncached = await client.post("/detect", content=SCENE, headers=UNCACHED)
        assert len(fake.requests) == count + 1

        assert [response.headers.get("x-cache") for response in (hit, missed, uncached)] == ["hit", "miss", None]
        assert 'cache;desc="hit";dur=' in hit.headers["server-timing"]
        assert [stage for stage in ("decode;", "batch;", "infer;") if stage in hit.headers["server-timing"]] == []
        assert 'cache;desc="miss";dur=' in missed.headers["server-timing"]
        assert "cache;" not in uncached.headers["server-timing"]
        assert found(hit) == found(uncached)
        for query in ("confidence=0.5", "classes=1", "max_detections=1", "boxes=coco", "format=coco-results", "format=image"):
            hit = await client.post(f"/predict/tiny?{query}", content=SCENE)
            uncached = await client.post(f"/detect?{query}", content=SCENE, headers=UNCACHED)
            assert (hit.headers["x-cache"], found(hit)) == ("hit", found(uncached)), query


async def test_images_of_batches_and_dialects_use_the_same_results() -> None:
    async with gateway() as (fake, client):
        await until_hit(client, "/detect", content=SCENE)
        count = len(fake.requests)
        batch = await client.post("/detect/batch", files=[("images", SCENE)] * 3)
        dialect = await client.post("/v1/vision/detection", files={"image": SCENE})
        assert len(fake.requests) == count
        new = await client.post("/detect/batch", files=[("images", SCENE + b" ")] * 8)

    assert len(fake.requests) == count + 1
    assert [len(answer.json()["results"]) for answer in (batch, new)] == [3, 8]
    assert dialect.headers["x-cache"] == "hit"


@pytest.mark.parametrize("is_shared", [False, True])
async def test_keys_share_results_only_if_the_settings_say_so(tmp_path: Path, *, is_shared: bool) -> None:
    keys = write_keys(tmp_path, ("camera", "camera", "detect"), ("door", "door", "detect"))
    camera, door = ({"x-api-key": f"{name}.{name}"} for name in ("camera", "door"))
    async with gateway(api_keys_file=keys, cache_shared=is_shared) as (_, client):
        await until_hit(client, "/detect", content=SCENE, headers=camera)
        first = await client.post("/detect", content=SCENE, headers=door)

        assert first.headers["x-cache"] == ("hit" if is_shared else "miss")
        assert (await until_hit(client, "/detect", content=SCENE, headers=door)).status_code == 200
