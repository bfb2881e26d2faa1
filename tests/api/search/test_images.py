"""What is kept of an image, by its id; and what reports say of the database."""

from collections.abc import AsyncIterator
from pathlib import Path
from urllib.parse import quote

import httpx
import msgspec
import pytest

from app.main import create_app
from app.search.postgres.engine import PostgresEngine
from app.settings.schema import Settings
from tests.api.conftest import write_keys
from tests.api.search.pictures import index, picture
from tests.search.made import gateway_of
from tests.support import json, started

IMAGE = picture((10, 10, 89, 89), (110, 10, 189, 89))


async def test_an_image_is_shown_and_deleted(gateway: httpx.AsyncClient, engine: PostgresEngine) -> None:
    await index(engine, gateway, "Zürich 1", IMAGE, ["EXIT"], camera=3)
    path = f"/query/image/{quote('Zürich 1')}"
    shown = json(await gateway.get(path))
    with_vector = json(await gateway.get(f"/v1{path}?include_embedding=true"))
    statistics = json(await gateway.get("/query/stats"))
    deleted = json(await gateway.delete(path))

    assert (shown["status"], shown["image_id"], shown["error"], shown["global_embedding"]) == ("success", "Zürich 1", None, None)
    about = shown["metadata"]
    assert (about["image_path"], about["width"], about["height"]) == ("/images/Zürich 1.png", 200, 100)
    assert (about["metadata"], len(about["imohash"]), about["duplicate_group_id"]) == ({"camera": 3}, 64, None)
    assert sorted(shown["indexed_in"]) == ["faces", "global", "ocr", "people", "vehicles"]
    numbers = [shown[f"num_{name}"] for name in ("detections", "vehicle_detections", "person_detections", "faces")]
    assert (numbers, shown["has_ocr"], shown["full_text"]) == ([2, 1, 1, 2], True, "EXIT")
    assert len(with_vector["global_embedding"]) == 12
    counts = {each["name"]: each["doc_count"] for each in statistics["indexes"]}
    assert counts == {f"visual_search_{name}": 1 for name in ("global", "vehicles", "people", "ocr")} | {"visual_search_faces": 2}
    assert statistics["indexes"][0].keys() == {"name", "doc_count", "size_bytes", "size_human", "exists"}
    assert (statistics["total_documents"], statistics["total_size_human"][-3:]) == (6, "KiB")
    assert (sorted(deleted["deleted_from"]), deleted["total_deleted"]) == (sorted(shown["indexed_in"]), 6)
    assert json(await gateway.get(path), 404)["code"] == json(await gateway.delete(path), 404)["code"] == "unknown_record"


async def test_odd_ids_are_unknown(gateway: httpx.AsyncClient) -> None:
    for odd in ("a%00b", "x" * 257, "x" * 2000, "%F0%9F%98%80", "%E2%80%A8", "%FF", "a%2Fb", "..", "%0A", "'--"):
        for path in (f"/query/image/{odd}", f"/query/image/{odd}/thumbnail"):
            assert (await gateway.get(path)).status_code in {400, 404}
        assert (await gateway.delete(f"/query/image/{odd}")).status_code in {400, 404, 405}


async def test_pictures_are_there_if_they_were_kept(gateway: httpx.AsyncClient, engine: PostgresEngine) -> None:
    await index(engine, gateway, "one", IMAGE)
    face = json(await gateway.post("/faces/search", content=IMAGE))["results"][0]["face_id"]
    kept = await gateway.get("/query/image/one/thumbnail")
    none = json(await gateway.get(f"/query/image/one/thumbnail?face_id={face}"), 404)

    assert (kept.content, kept.headers["content-type"], kept.headers["cache-control"][:7]) == (b"a JPEG", "image/jpeg", "private")
    assert none["code"] in {"not_offered", "unknown_record"}
    assert json(await gateway.get("/query/image/one/thumbnail?face_id=x"), 404)["code"] == "unknown_record"
    await gateway.delete("/query/image/one")  # whose records would be counted in another test


@pytest.fixture
async def locked(gateway_settings: Settings, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    file = write_keys(tmp_path, ("reader", "secret", "search"), ("writer", "secret", "ingest"), ("camera", "secret", "detect"))
    async with gateway_of(msgspec.structs.replace(gateway_settings, api_keys_file=file)) as client:
        yield client


async def test_a_key_that_may_search_may_not_delete(locked: httpx.AsyncClient) -> None:
    async def ask(key: str, method: str, path: str) -> int:
        return (await locked.request(method, path, headers={"X-API-Key": f"{key}.secret"})).status_code

    assert [await ask(key, "DELETE", "/query/image/x") for key in ("reader", "camera", "writer")] == [403, 403, 404]
    assert [await ask(key, "GET", "/query/stats") for key in ("reader", "camera", "writer")] == [200, 403, 403]
    assert [await ask(key, "POST", "/ocr/search?text=x") for key in ("reader", "camera", "writer")] == [200, 403, 403]
    foreign = {"X-API-Key": "writer.secret", "Origin": "https://elsewhere.example"}
    assert (await locked.delete("/query/image/x", headers=foreign)).status_code == 403


@pytest.mark.parametrize("mode", ["on", "alone"])
async def test_without_its_database_only_search_is_unhealthy(gateway_settings: Settings, tmp_path: Path, mode: str) -> None:
    away = msgspec.structs.replace(gateway_settings, search=mode, database_url=f"postgresql://nereid@/nereid?host={tmp_path}")
    async with gateway_of(away) if mode == "on" else started(create_app(away)) as client:
        health, ready, readyz = [await client.get(path) for path in ("/health", "/ready", "/readyz")]
        searches = [await client.post(path, content=IMAGE) for path in ("/search/image", "/faces/search", "/search/object")]
        searches += [await client.post("/ocr/search?text=x"), await client.get("/query/stats"), await client.get("/query/image/x")]
        detect = await client.post("/detect", content=IMAGE)

    assert json(health)["status"] == "healthy"
    assert json(health)["search"]["status"] == "unhealthy"
    assert "database" in json(health)["search"]["detail"]
    is_alone = mode == "alone"
    assert (ready.status_code, readyz.status_code, detect.status_code) == ((503, 503, 404) if is_alone else (200, 200, 200))
    assert ready.json()["services"]["search"]["ok"] is False
    assert {(reply.status_code, reply.json()["code"]) for reply in searches} == {(503, "search_unavailable")}
