"""Requests of search while the database is away, does not answer, or has much to do."""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from app.main import create_app
from app.search.postgres.engine import PostgresEngine
from app.settings.schema import Settings
from tests.api.search.conftest import OpenGateway, key
from tests.postgres import Server
from tests.search.made import gateway_of
from tests.support import SCENE, json, started, until

WAYS = (
    ("POST", "/ingest?timeout_ms=300", SCENE),
    ("POST", "/search/image?timeout_ms=300", SCENE),
    ("POST", "/v1/vision/face/list?timeout_ms=300", b""),
    *(("GET", path, b"") for path in ("/query/duplicates", "/query/stats", "/ingest/jobs")),
)


async def test_every_request_ends_by_its_deadline(open_gateway: OpenGateway, own_engine: PostgresEngine) -> None:
    """With 503 once the worker has found out that the database hangs."""
    async with open_gateway(timeout_seconds=0.5) as client:
        async with own_engine.as_owner() as connection:
            await connection.execute("LOCK TABLE models, images, parts, jobs")
            for method, path, body in WAYS:
                assert (await client.request(method, path, content=body)).status_code in {503, 504}, path

        async def answers() -> bool:
            return (await client.get("/ingest/jobs")).status_code == httpx.codes.OK

        await until(answers)


async def test_database_that_many_use_is_not_taken_for_one_that_hangs(
    open_gateway: OpenGateway, own_engine: PostgresEngine
) -> None:
    names = ("one", "two", "three")
    async with open_gateway(dict.fromkeys(names, "search")) as client:
        async with own_engine.as_owner() as connection:
            await connection.execute("LOCK TABLE images")
            slow = [asyncio.create_task(client.get("/query/duplicates", headers=key(name))) for name in names for _ in range(4)]
            await asyncio.sleep(2.5)  # longer than the gateway waits for the database to say that it lives
        assert [reply.status_code for reply in await asyncio.gather(*slow)] == [httpx.codes.OK] * len(slow)


@pytest.mark.parametrize(
    ("table", "method", "path"),
    [("images", "GET", "/query/duplicates"), ("images", "GET", "/query/duplicates/stats"), ("texts", "POST", "/ocr/search?text=r")],
)
async def test_slow_requests_of_one_caller_leave_connections_to_others(
    open_gateway: OpenGateway, own_engine: PostgresEngine, table: str, method: str, path: str
) -> None:
    async with open_gateway({"one": "search", "other": "search ingest"}) as client:
        json(await client.post("/ingest", content=SCENE, headers=key("other")), 201)
        async with own_engine.as_owner() as connection:
            await connection.execute(f"LOCK TABLE {table}")
            slow = [asyncio.create_task(client.request(method, path, headers=key("one"))) for _ in range(20)]
            await asyncio.sleep(0.3)
            late = json(await client.post("/ocr/search?text=r&timeout_ms=100", headers=key("one")), 504)
            json(await client.get("/ingest/jobs", headers=key("other")))
            if table == "texts":
                assert json(await client.post("/search/image", content=SCENE, headers=key("other")))["total_results"] == 1
        replies = [json(reply) for reply in await asyncio.gather(*slow)]

    assert late["code"] == "deadline_passed"
    assert table != "texts" or [reply["total_results"] for reply in replies] == [1] * len(slow)


@pytest.mark.parametrize("mode", ["on", "alone"])
async def test_only_search_is_unhealthy_without_its_database(gateway_settings: Settings, tmp_path: Path, mode: str) -> None:
    away = msgspec.structs.replace(gateway_settings, search=mode, database_url=f"postgresql://nereid@/nereid?host={tmp_path}")
    async with gateway_of(away) if mode == "on" else started(create_app(away)) as client:
        health, ready, readyz = [await client.get(path) for path in ("/health", "/ready", "/readyz")]
        searches = [await client.post(path, content=SCENE) for path in ("/search/image", "/faces/search", "/search/object")]
        searches += [await client.post("/ocr/search?text=x"), await client.get("/query/stats"), await client.get("/query/image/x")]
        detect = await client.post("/detect", content=SCENE)

    assert (json(health)["status"], json(health)["search"]["status"]) == ("healthy", "unhealthy")
    assert "database" in json(health)["search"]["detail"]
    statuses = (ready.status_code, readyz.status_code, detect.status_code)
    assert statuses == ((503, 503, 404) if mode == "alone" else (200, 200, 200))
    assert ready.json()["services"]["search"]["ok"] is False
    assert {(reply.status_code, reply.json()["code"]) for reply in searches} == {(503, "search_unavailable")}


async def test_vector_that_search_cannot_keep_is_refused_with_the_time_to_wait(
    searching: httpx.AsyncClient, database: str, postgres: Server
) -> None:
    name = urlsplit(database).path.removeprefix("/")
    json(await searching.post("/embed/image?index=true", content=SCENE))
    await postgres.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
    await postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")  # noqa: S608
    refused = await searching.post("/embed/image?index=true", content=SCENE)

    assert (json(refused, 503)["code"], refused.headers["retry-after"]) == ("search_unavailable", "1")


async def test_image_is_not_added_where_its_index_would_be_damaged(
    searching: httpx.AsyncClient, database: str, postgres: Server, tmp_path: Path
) -> None:
    (tmp_path / "a.bmp").write_bytes(SCENE)
    await postgres.pretend(database, "0.8.2")
    problem = json(await searching.post("/v1/ingest", files={"image": SCENE}), 503)
    ended = json(await searching.post("/ingest/directory", params={"directory": str(tmp_path)}))

    assert problem["code"] == "index_refused"
    assert problem["detail"].startswith("pgvector 0.8.2 can damage an index of vectors")
    assert (ended["state"], "install pgvector 0.8.4 or later" in ended["error"]) == ("failed", True)
    assert json(await searching.post("/search/image", content=SCENE))["total_results"] == 0
    assert json(await searching.post("/detect", content=SCENE))["num_detections"] == 2
