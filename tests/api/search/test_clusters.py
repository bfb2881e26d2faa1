"""Clusters and near duplicates, over HTTP."""

import asyncio
from collections.abc import AsyncIterator
from threading import Event
from typing import Any

import httpx
import numpy as np
import pytest

from app.api.search import clusters
from app.embedded.server import EmbeddedTriton
from app.search.clusters import find_centroids
from app.search.postgres.engine import PostgresEngine
from app.settings.schema import Settings
from tests.processes import PATIENCE_SECONDS
from tests.search.made import like, searching, with_vector
from tests.support import json

Gateway = tuple[PostgresEngine, httpx.AsyncClient]


@pytest.fixture
async def gateway(settings: Settings, triton: EmbeddedTriton, database: str) -> AsyncIterator[Gateway]:
    assert triton.poll() is None
    async with searching(settings, database) as made:
        yield made


async def test_an_index_has_clusters(gateway: Gateway) -> None:
    """Each has what is alike; what is added later is assigned when that is asked for."""
    engine, client = gateway
    for axis in (0, 4, 8):
        for at in range(4):
            await engine.add("", with_vector(f"{axis}-{at}", like(axis, 0.02 * at)))
    untrained = json(await client.get("/clusters/stats/global"))
    trained = json(await client.post("/clusters/train/global?n_clusters=3"))
    statistics = json(await client.get("/v1/clusters/stats/global"))
    await engine.add("", with_vector("late", like(4, 0.05)))
    assigned = json(await client.post("/clusters/assign/global"))
    members = [json(await client.get(f"/clusters/global/{number}"))["members"] for number in range(3)]
    own = next(group for group in members if len(group) == 5)
    second = json(await client.get(f"/clusters/global/{members.index(own)}?page=1&size=2"))

    assert (untrained["faiss"]["is_trained"], untrained["opensearch_clusters"]) == (False, [])
    assert trained.pop("training_time_s") > 0
    assert trained == {
        "status": "success",
        "index_name": "global",
        "n_vectors": 12,
        "n_clusters": 3,
        "avg_cluster_size": 4.0,
        "empty_clusters": 0,
        "documents_updated": 12,
    }
    assert [each["count"] for each in statistics["opensearch_clusters"]] == [4, 4, 4]
    assert (statistics["faiss"]["n_vectors"], statistics["faiss"]["max_cluster_size"]) == (12, 4)
    assert assigned["documents_updated"] == 1
    assert sorted(({member["image_id"][0] for member in group} for group in members), key=sorted) == sorted(
        [{"0"}, {"4", "l"}, {"8"}], key=sorted
    )
    assert own[0].keys() == {"image_id", "image_path", "cluster_distance", "score", "class_id", "box"}
    assert [member["cluster_distance"] for member in own] == sorted(member["cluster_distance"] for member in own)
    assert (second["members"], second["count"], second["total"], second["page"]) == (own[2:4], 2, 5, 1)


def test_centres_are_the_same_each_time_and_have_length_1() -> None:
    """Also those of opposite vectors, or if there are fewer vectors than clusters."""
    vectors = np.array([like(axis, turn) for axis in range(12) for turn in np.linspace(0, 0.5, 20)], np.float32)
    first, second = find_centroids(vectors, 9), find_centroids(vectors, 9)
    opposite = np.array([like(0), -like(0)])

    assert (first == second).all()
    for found, number in ((first, 9), (find_centroids(opposite, 1), 1), (find_centroids(opposite, 5), 2)):
        assert np.linalg.norm(found, axis=1) == pytest.approx(np.ones(number), abs=1e-6)


async def test_one_training_at_a_time(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """It takes a core for long, but not the loop: others are answered meanwhile."""
    engine, client = gateway
    await engine.add("", with_vector("one", like(0)))
    may_end, has_begun = Event(), asyncio.Event()
    loop = asyncio.get_running_loop()

    def find(*arguments: Any) -> Any:  # noqa: ANN401
        loop.call_soon_threadsafe(has_begun.set)
        may_end.wait(PATIENCE_SECONDS)
        return find_centroids(*arguments)

    monkeypatch.setattr(clusters, "find_centroids", find)
    training = asyncio.create_task(client.post("/clusters/train/global"))
    await has_begun.wait()
    refused = await client.post("/persons/cluster")
    may_end.set()

    assert (json(refused, 429)["code"], refused.headers["retry-after"]) == ("gateway_full", "10")
    assert json(await training)["n_clusters"] == 1


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("POST", "/clusters/train/global", 404, "unknown_record"),
        ("POST", "/clusters/assign/faces", 404, "unknown_record"),
        ("GET", "/clusters/global/0", 404, "unknown_record"),
        ("GET", "/clusters/global/1024", 400, "invalid_parameter"),
        ("POST", "/clusters/train/ocr", 400, "invalid_parameter"),
        ("POST", "/clusters/train/global?n_clusters=1025", 400, "invalid_parameter"),
        ("POST", "/clusters/train/global?max_samples=50001", 400, "invalid_parameter"),
        ("POST", "/clusters/rebalance/global", 404, "not_offered"),
        ("GET", "/clusters/albums?min_size=5", 404, "not_offered"),
        ("GET", "/query/duplicates/nothing", 404, "unknown_record"),
        ("GET", "/query/duplicates?size=101", 400, "invalid_parameter"),
        ("GET", "/query/duplicates?min_size=1", 400, "invalid_parameter"),
    ],
)
async def test_what_cannot_be_done_is_said(shared: httpx.AsyncClient, method: str, path: str, status: int, code: str) -> None:
    problem = json(await shared.request(method, path), status)

    assert (problem["code"], bool(problem["detail"])) == (code, True)


@pytest.fixture(scope="module")
async def shared(settings: Settings, triton: EmbeddedTriton, postgres: Any) -> AsyncIterator[httpx.AsyncClient]:  # noqa: ANN401
    assert triton.poll() is None
    async with postgres.fresh() as url, searching(settings, url) as (_, client):
        yield client


async def test_near_duplicates_are_in_groups(gateway: Gateway) -> None:
    engine, client = gateway
    for axis, turns in ((0, (0, 0.01, 0.02)), (4, (0, 0.01)), (8, (0,))):
        for at, turn in enumerate(turns):
            await engine.add("", with_vector(f"{axis}-{at}", like(axis, turn)), near=0.99)
    groups = json(await client.get("/query/duplicates"))
    large = json(await client.get("/query/duplicates?min_size=3&size=1"))
    statistics = json(await client.get("/v1/query/duplicates/stats"))
    group = json(await client.get(f"/query/duplicates/{groups['groups'][0]['group_id']}"))

    assert (groups["total_groups"], groups["total_duplicates"], groups["page"], groups["size"]) == (2, 5, 0, 50)
    assert groups["groups"][0] == {
        "group_id": group["group_id"],
        "primary_image_id": "0-0",
        "primary_image_path": "/0-0.jpg",
        "member_count": 3,
    }
    assert (large["total_groups"], large["groups"]) == (1, groups["groups"][:1])
    assert statistics == {
        "status": "success",
        "total_images": 6,
        "grouped_images": 5,
        "ungrouped_images": 1,
        "duplicate_groups": 2,
        "average_group_size": 2.5,
    }
    assert [(each["image_id"], each["is_primary"]) for each in group["members"]] == [("0-0", True), ("0-1", False), ("0-2", False)]
    assert [each["duplicate_score"] for each in group["members"]] == pytest.approx([1, np.cos(0.01), np.cos(0.02)], abs=1e-5)
