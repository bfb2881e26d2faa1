"""Hostile requests that a worker passes on: they reach no other route of the process of search, and a bounded number of it."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import msgspec
import pytest

from app.api import beside
from app.settings.schema import Settings
from tests.api.conftest import post_unread, write_keys
from tests.postgres import Server
from tests.search.made import gateway_of, served
from tests.support import SCENE, json

DOTS = ["/ingest/%2e%2e/metrics", "/query/%2e%2e/health", "/search/%2e%2e%2fready", "/v1/query/%2e%2e/%2e%2e/livez"]


@pytest.mark.parametrize("path", DOTS)
async def test_path_with_dots_leads_to_no_other_route(gateway: httpx.AsyncClient, path: str) -> None:
    assert json(await gateway.get(path), 404)["code"] == "not_found"


async def test_unknown_path_of_search_is_told_where_the_others_are(gateway: httpx.AsyncClient) -> None:
    page = (await gateway.get("/search/docs")).text

    assert "/search/docs lists those that do" in json(await gateway.get("/search/nothing"), 404)["detail"]
    assert "/search/image" in page


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
    detected = await gateway.post("/detect", content=SCENE)
    may_end.set()
    answers = await asyncio.gather(*uploads)

    assert (refused["code"], refused["detail"]) == ("gateway_full", "too many requests of search are in progress")
    assert detected.status_code == 200
    assert {answer.status_code for answer in answers} <= {200, 201}
    json(await gateway.get("/query/duplicates"), 200)


async def test_body_without_a_valid_key_is_refused_before_it_is_received(search_settings: Settings, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, ("camera", "s", "ingest"))
    async with served(msgspec.structs.replace(search_settings, api_keys_file=keys)) as app:
        for given in ({}, {"x-api-key": "camera.wrong"}):
            refused = await post_unread(app, "/v1/ingest", {"content-length": "9", **given})
            assert (refused.status, refused.problem["code"]) == (401, "unauthorized")


async def test_body_that_search_refuses_is_answered_before_all_of_it_is_sent(search_settings: Settings) -> None:
    """For two seconds the rest is received, so that the client reads the answer."""
    is_sent = False

    async def send_too_much() -> AsyncIterator[bytes]:
        nonlocal is_sent
        yield bytes(2 << 20)
        for _ in range(3000):
            await asyncio.sleep(0.01)
            yield b"more"
        is_sent = True

    async with gateway_of(msgspec.structs.replace(search_settings, max_file_size_mb=1)) as client:
        refused = json(await client.post("/ingest", content=send_too_much()), 413)

    assert refused["code"] == "body_too_large"
    assert not is_sent


async def test_vector_that_search_cannot_keep_is_refused_with_the_time_to_wait(search_settings: Settings, postgres: Server) -> None:
    name = urlsplit(search_settings.database_url).path.removeprefix("/")
    async with gateway_of(search_settings) as client:
        json(await client.post("/embed/image?index=true", content=SCENE), 200)
        await postgres.execute(f"ALTER DATABASE {name} ALLOW_CONNECTIONS false")
        await postgres.execute(f"SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '{name}'")  # noqa: S608
        refused = await client.post("/embed/image?index=true", content=SCENE)

    assert json(refused, 503)["code"] == "search_unavailable"
    assert refused.headers["retry-after"] == "1"
