"""What is kept of an image, by its id; and who may see and delete it."""

from urllib.parse import quote

from app.search.postgres.engine import PostgresEngine
from tests.api.search.conftest import OpenGateway, key
from tests.api.search.pictures import index, picture
from tests.support import json

IMAGE = picture((10, 10, 89, 89), (110, 10, 189, 89))


async def test_image_is_shown_and_deleted(open_gateway: OpenGateway, own_engine: PostgresEngine) -> None:
    path = f"/query/image/{quote('Zürich 1')}"
    async with open_gateway(search_thumbnails=True) as client:
        await index(own_engine, client, "Zürich 1", IMAGE, ["EXIT"], camera=3)
        shown = json(await client.get(path))
        with_vector = json(await client.get(f"/v1{path}?include_embedding=true"))
        statistics = json(await client.get("/query/stats"))
        face = json(await client.post("/faces/search", content=IMAGE))["results"][0]["face_id"]
        kept = await client.get(f"{path}/thumbnail")
        none = [json(await client.get(f"{path}/thumbnail?face_id={id_}"), 404)["code"] for id_ in (face, "x")]
        deleted = json(await client.delete(path))
        unknown = [json(await client.request(method, path), 404)["code"] for method in ("GET", "DELETE")]

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
    assert [none[1], *unknown] == ["unknown_record"] * 3
    assert (sorted(deleted["deleted_from"]), deleted["total_deleted"]) == (sorted(shown["indexed_in"]), 6)


KEYS = ("reader", "writer", "camera", "feeder")
SCOPES = {
    ("POST", "/ocr/search?text=x"): [200, 403, 403, 403],
    ("GET", "/query/stats"): [200, 403, 403, 403],
    ("DELETE", "/query/image/x"): [403, 404, 403, 404],
    ("POST", "/ingest"): [403, 201, 403, 200],
    ("POST", "/ingest/directory"): [403, 400, 403, 400],
    ("POST", "/embed/image?index=true"): [403, 403, 403, 200],
}
"""Statuses of a key with the scope `search`, `ingest`, `detect`, and both of the last."""


async def test_route_of_search_needs_a_key_with_its_scope(open_gateway: OpenGateway) -> None:
    async with open_gateway(dict(zip(KEYS, ("search", "ingest", "detect", "ingest detect"), strict=True))) as client:
        for (method, path), statuses in SCOPES.items():
            content = IMAGE if path.startswith(("/ingest", "/embed")) else None
            asked = [await client.request(method, path, content=content, headers=key(name)) for name in KEYS]
            assert (path, [answer.status_code for answer in asked]) == (path, statuses)
        foreign = {**key("writer"), "Origin": "https://elsewhere.example"}
        json(await client.delete("/query/image/x", headers=foreign), 403)
