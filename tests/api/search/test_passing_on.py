"""What a worker passes on to the process of search: its own routes alone, if a key allows it, and a bounded number of requests."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import msgspec
import pytest

from app.api import beside
from app.api.search import routes
from app.settings.schema import Settings
from tests.api.conftest import post_unread, write_keys
from tests.api.search.conftest import OpenGateway
from tests.search.made import served
from tests.support import SCENE, json

ROUTES = [
    (method, path) for route in (*routes.MODEL_ROUTES, *routes.ROUTES) for path in route.paths for method in route.http_methods
]
DOTS = ["/ingest/%2e%2e/metrics", "/query/%2e%2e/health", "/search/%2e%2e%2fready", "/v1/query/%2e%2e/%2e%2e/livez"]


async def test_routes_of_search_say_how_it_is_turned_on(faces: httpx.AsyncClient) -> None:
    for method, path in sorted(ROUTES):
        asked = re.sub(r"{\w+:\w+}", "1", path)
        for prefix in ("", "/v1"):
            problem = json(await faces.request(method, f"{prefix}{asked}?text=red"), 404)
            assert (path, problem["code"]) == (path, "not_offered")
            assert problem["detail"].startswith(f"{asked} is off, because this gateway keeps no images; `nereid serve --search`")


async def test_paths_that_are_not_of_search_lead_to_no_other_route(gateway: httpx.AsyncClient) -> None:
    for path in DOTS:
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


async def test_body_without_a_valid_key_is_refused_before_it_is_received(search_settings: Settings, tmp_path: Path) -> None:
    keys = write_keys(tmp_path, ("camera", "s", "ingest"))
    async with served(msgspec.structs.replace(search_settings, api_keys_file=keys)) as app:
        for headers in ({}, {"x-api-key": "camera.wrong"}):
            refused = await post_unread(app, "/v1/ingest", {"content-length": "9", **headers})
            assert (refused.status, refused.problem["code"]) == (401, "unauthorized")


async def test_body_that_search_refuses_is_answered_before_all_of_it_is_sent(open_gateway: OpenGateway) -> None:
    """For two seconds the rest is received, so that the client reads the answer."""
    is_sent = False

    async def send_too_much() -> AsyncIterator[bytes]:
        nonlocal is_sent
        yield bytes(2 << 20)
        for _ in range(3000):
            await asyncio.sleep(0.01)
            yield b"more"
        is_sent = True

    async with open_gateway(max_file_size_mb=1) as client:
        refused = json(await client.post("/ingest", content=send_too_much()), 413)

    assert (refused["code"], is_sent) == ("body_too_large", False)
