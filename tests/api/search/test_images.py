"""What is kept of an image, by its id; and who may see and delete it."""

from urllib.parse import quote

import httpx

from app.search.postgres.engine import PostgresEngine
from tests.api.search.conftest import OpenGateway, key
from tests.api.search.pictures import index, picture
from tests.support import json

IMAGE = picture((10, 10, 89, 89), (110, 10, 189, 89))


async def test_image_is_shown_and_deleted(searching: httpx.AsyncClient, own_engine: PostgresEngine) -> None:
    await index(own_engine, searching, "Zürich 1", IMAGE, ["EXIT"], camera=3)
    path = f"/query/image/{quote('Zürich 1')}"
    shown = json(await searching.get(path))
    with_vector = json(await searching.get(f"/v1{path}?include_embedding=true"))
    statistics = json(await searching.get("/query/stats"))
    face = json(await searching.post("/faces/search", content=IMAGE))["results"][0]["face_id"]
    kept = await searching.get(f"{path}/thumbnail")
    none = [json(await searching.get(f"{path}/thumbnail?face_id={id_}"), 404)["code"] for id_ in (face, "x")]
    deleted = json(await searching.delete(path))

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
    assert (kept.content, kept.headers["content-type"], kept.headers["cache-control"][:7]) == (b"a JPEG", "image/jpeg", "private")
    assert none[0] in {"not_offered", "unknown_record"}
    assert none[1] == "unknown_record"
    assert (sorted(deleted["deleted_from"]), deleted["total_deleted"]) == (sorted(shown["indexed_in"]), 6)
    assert json(await searching.get(path), 404)["code"] == json(await searching.delete(path), 404)["code"] == "unknown_record"


async def test_key_that_may_search_may_not_delete(open_gateway: OpenGateway) -> None:
    scopes = {"reader": "search", "writer": "ingest", "camera": "detect"}
    async with open_gateway(scopes) as client:

        async def ask(method: str, path: str) -> list[int]:
            return [(await client.request(method, path, headers=key(name))).status_code for name in scopes]

        assert await ask("DELETE", "/query/image/x") == [403, 404, 403]
        assert await ask("GET", "/query/stats") == [200, 403, 403]
        assert await ask("POST", "/ocr/search?text=x") == [200, 403, 403]
        foreign = {**key("writer"), "Origin": "https://elsewhere.example"}
        assert (await client.delete("/query/image/x", headers=foreign)).status_code == 403
