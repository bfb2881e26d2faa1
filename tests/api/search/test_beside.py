"""The process of search beside a worker: what is passed on to it, and requests while the database is away or has much to do."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import httpx
import msgspec
import pytest
from litestar.types import Message, Receive, Scope, Send

from app.api import beside
from app.api.search import routes
from app.main import create_app
from app.search.postgres.engine import PostgresEngine
from app.settings.schema import Settings
from tests.api.conftest import post_unread, write_keys
from tests.api.search.conftest import OpenGateway, key
from tests.postgres import Server, name_of
from tests.search.made import gateway_of, served
from tests.support import SCENE, call, json, started, until

ROUTES = [
    (method, path) for route in (*routes.MODEL_ROUTES, *routes.ROUTES) for path in route.paths for method in route.http_methods
]


async def test_routes_of_search_say_how_it_is_turned_on(faces: httpx.AsyncClient) -> None:
    for method, path in sorted(ROUTES):
        asked = re.sub(r"{\w+:\w+}", "1", path)
        problem = json(await faces.request(method, f"/v1{asked}?text=red"), 404)
        assert (path, problem["code"]) == (path, "not_offered")
        assert problem["detail"].startswith(f"{asked} is off, because this gateway keeps no images; `nereid serve --search`")


async def test_paths_that_are_not_of_search_lead_to_no_other_route(gateway: httpx.AsyncClient) -> None:
    for path in ("/ingest/%2e%2e/metrics", "/query/%2e%2e/health", "/search/%2e%2e%2fready", "/v1/query/%2e%2e/%2e%2e/livez"):
        assert json(await gateway.get(path), 404)["code"] == "not_found"
    assert "/search/docs lists those that do" in json(await gateway.get("/search/nothing"), 404)["detail"]
    assert "/search/image" in (await gateway.get("/search/docs")).text


async def test_header_that_cannot_be_passed_on_is_an_error_of_the_client(gateway: httpx.AsyncClient) -> None:
    assert json(await gateway.get("/query/duplicates", headers={"x-odd": "\0"}), 400)["code"] == "malformed_request"


async def test_unfinished_uploads_are_refused_above_a_limit_and_delay_no_detection(
    gateway: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(beside, "MAX_PASSED_ON", 2)
    is_begun, may_end = asyncio.Semaphore(0), asyncio.Event()

    async def send_slowly() -> AsyncIterator[bytes]:
        is_begun.release()
        await may_end.wait()
        yield SCENE

    uploads = [asyncio.create_task(gateway.post("/ingest", content=send_slowly())) for _ in range(2)]
    for _ in uploads:
        await is_begun.acquire()
    refused = json(await gateway.get("/query/duplicates"), 429)
    json(await gateway.post("/detect", content=SCENE))
    may_end.set()

    assert (refused["code"], refused["detail"]) == ("gateway_full", "too many requests of search are in progress")
    assert {answer.status_code for answer in await asyncio.gather(*uploads)} <= {200, 201}
    json(await gateway.get("/query/duplicates"))


async def test_client_that_leaves_with_the_last_byte_interrupts_nothing(
    search_settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.api.receiving.client_watch._FIRST_CHECK_SECONDS", 0)
    async with served(search_settings) as app:
        has_all = asyncio.Event()

        async def receive() -> Any:  # noqa: ANN401
            await has_all.wait()
            return {"type": "http.disconnect"}

        async def watched(scope: Scope, receive: Receive, send: Send) -> None:
            async def send_slowly(message: Message) -> None:
                await send(message)
                if message.get("body"):
                    has_all.set()
                    await asyncio.sleep(0.1)

            await app(scope, receive, send_slowly)

        assert (await call(watched, receive, "/ocr/search?text=r")).status == 200


async def test_process_is_asked_about_its_database_only_while_requests_wait(
    gateway: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    json(await gateway.post("/embed/image?index=true", content=SCENE))
    monkeypatch.setattr(beside, "_SLOW_SECONDS", 0.0)
    monkeypatch.setattr(beside.SearchProcess, "why_unusable", asked := AsyncMock(return_value=None))
    await asyncio.sleep(0.6)

    asked.assert_not_called()


async def test_body_without_a_valid_key_is_refused_before_it_is_received(search_settings: Settings, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, ("camera", "s", "ingest"))
    async with served(msgspec.structs.replace(search_settings, api_keys_file=keys)) as app:
        for headers in ({}, {"x-api-key": "camera.wrong"}):
            refused = await post_unread(app, "/v1/ingest", {"content-length": "9", **headers})
            assert (refused.status, refused.problem["code"]) == (401, "unauthorized")


async def test_every_request_ends_by_its_deadline(open_gateway: OpenGateway, own_engine: PostgresEngine) -> None:
    """With 503 once the worker has found out that the database hangs."""
    async with open_gateway(timeout_seconds=0.5) as client:
        async with own_engine.as_owner() as connection:
            await connection.execute("LOCK TABLE models, images, parts, jobs")
            for path in ("/ingest?timeout_ms=300", "/search/image?timeout_ms=300", "/v1/vision/face/list?timeout_ms=300"):
                content = b"" if "face" in path else SCENE
                assert (await client.post(path, content=content)).status_code in {503, 504}, path
            for path in ("/query/duplicates", "/query/stats", "/ingest/jobs"):
                assert (await client.get(path)).status_code in {503, 504}, path

        async def answers() -> bool:
            return (await client.get("/ingest/jobs")).status_code == httpx.codes.OK

        await until(answers)


async def test_slow_requests_of_one_caller_leave_connections_to_others(
    open_gateway: OpenGateway, own_engine: PostgresEngine
) -> None:
    async with open_gateway({"one": "search", "other": "search ingest"}) as client:
        json(await client.post("/ingest", content=SCENE, headers=key("other")), 201)
        async with own_engine.as_owner() as connection:
            await connection.execute("LOCK TABLE texts")
            slow = [asyncio.create_task(client.post("/ocr/search?text=r", headers=key("one"))) for _ in range(20)]
            await asyncio.sleep(0.3)
            late = json(await client.post("/ocr/search?text=r&timeout_ms=100", headers=key("one")), 504)
            assert json(await client.post("/search/image", content=SCENE, headers=key("other")))["total_results"] == 1
        replies = [json(reply) for reply in await asyncio.gather(*slow)]

    assert late["code"] == "deadline_passed"
    assert [reply["total_results"] for reply in replies] == [1] * len(slow)


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
    assert [ready.status_code, readyz.status_code, detect.status_code] == ([503, 503, 404] if mode == "alone" else [200] * 3)
    assert ready.json()["services"]["search"]["ok"] is False
    assert {(reply.status_code, reply.json()["code"]) for reply in searches} == {(503, "search_unavailable")}


async def test_database_that_can_only_be_read_is_named(search_settings: Settings, database: str, postgres: Server) -> None:
    await postgres.execute(f"ALTER DATABASE {name_of(database)} SET default_transaction_read_only = on")
    async with gateway_of(search_settings) as client:
        health = json(await client.get("/health"))
        refused = json(await client.post("/ingest", files={"image": SCENE}), 503)

    assert health["search"] == {"status": "healthy", "detail": "The database of search can only be read: no images are added"}
    assert refused["detail"] == "The database of search can only be read"


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
