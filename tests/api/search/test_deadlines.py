"""Requests of search end in time while the database does not answer."""

import asyncio
from pathlib import Path

import httpx
import msgspec
import pytest

from app.search.postgres.engine import PostgresEngine
from app.settings.schema import Settings
from tests.api.conftest import write_keys
from tests.search.made import gateway_of
from tests.support import SCENE, until

WAYS = (
    ("POST", "/ingest?timeout_ms=300", SCENE),
    ("POST", "/search/image?timeout_ms=300", SCENE),
    ("POST", "/v1/vision/face/list?timeout_ms=300", b""),
    *(("GET", path, b"") for path in ("/query/duplicates", "/query/stats", "/ingest/jobs")),
)


async def test_every_request_has_a_deadline(search_settings: Settings) -> None:
    engine = PostgresEngine(search_settings.database_url)
    async with gateway_of(msgspec.structs.replace(search_settings, timeout_seconds=0.5)) as client:
        async with engine.as_owner() as connection:
            await connection.execute("LOCK TABLE models, images, parts, jobs")
            for method, path, body in WAYS:
                status = (await client.request(method, path, content=body)).status_code
                # 503, once the worker has found out that the database hangs.
                assert status in {httpx.codes.GATEWAY_TIMEOUT, httpx.codes.SERVICE_UNAVAILABLE}, path

        async def answers() -> bool:
            return (await client.get("/ingest/jobs")).status_code == httpx.codes.OK

        await until(answers)
    await engine.close()


async def test_a_database_that_many_use_is_not_one_that_hangs(search_settings: Settings, tmp_path: Path) -> None:
    names = "one", "two", "three"
    file = write_keys(tmp_path, *((name, "secret", "search") for name in names))
    engine = PostgresEngine(search_settings.database_url)
    async with gateway_of(msgspec.structs.replace(search_settings, api_keys_file=file)) as client:
        async with engine.as_owner() as connection:
            await connection.execute("LOCK TABLE images")
            headers = [{"X-API-Key": f"{name}.secret"} for name in names for _ in range(4)]
            slow = [asyncio.create_task(client.get("/query/duplicates", headers=key)) for key in headers]
            await asyncio.sleep(2.5)  # longer than the gateway waits for the database to say that it lives
        assert [reply.status_code for reply in await asyncio.gather(*slow)] == [httpx.codes.OK] * len(slow)
    await engine.close()


@pytest.mark.parametrize("path", ["/query/duplicates", "/query/duplicates/stats"])
async def test_a_caller_who_lists_leaves_connections_to_others(search_settings: Settings, tmp_path: Path, path: str) -> None:
    file = write_keys(tmp_path, ("one", "secret", "search"), ("other", "secret", "ingest"))
    engine = PostgresEngine(search_settings.database_url)
    async with gateway_of(msgspec.structs.replace(search_settings, api_keys_file=file)) as client:
        one, other = ({"X-API-Key": f"{name}.secret"} for name in ("one", "other"))
        async with engine.as_owner() as connection:
            await connection.execute("LOCK TABLE images")
            slow = [asyncio.create_task(client.get(path, headers=one)) for _ in range(12)]
            await asyncio.sleep(0.3)
            assert (await client.get("/ingest/jobs", headers=other)).status_code == httpx.codes.OK
        assert {reply.status_code for reply in await asyncio.gather(*slow)} == {httpx.codes.OK}
    await engine.close()
