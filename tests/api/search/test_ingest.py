"""POST /ingest and /ingest/batch: what is kept of images, in a real PostgreSQL."""

from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import numpy as np
import pytest
from blake3 import blake3
from PIL import Image

from app.search.postgres.engine import PostgresEngine
from tests.api.search.conftest import OpenGateway
from tests.fakes.models import scene
from tests.postgres import Server
from tests.support import SCENE, json

OTHER = scene("BMP", background="yellow", shift=10)
KEYS = {"status", "image_id", "num_detections", "num_faces", "embedding_norm", "imohash", "indexed", "near_duplicate", "ocr"} | {
    *("existing_image_id", "existing_image_path", "message", "error", "errors", "total_time_ms", "request_id")
}
BATCH = {"status", "total", "processed", "duplicates", "errors_count", "indexed", "near_duplicates", "deferred_ops"} | {
    *("duplicate_details", "error_details", "near_duplicate_details", "image_ids", "total_time_ms", "request_id")
}
MISSING = """
[ocr.steps]
lines = { model = "missing" }
text = { model = "ocr_recognition", of = "lines", crop = "corners" }
[faces.steps]
faces = { model = "other" }
descriptions = { model = "faces_description", of = "faces" }
"""


async def ingest(client: httpx.AsyncClient, image: bytes = SCENE, status: int = 201, **form: Any) -> dict[str, Any]:  # noqa: ANN401 - fields
    found: dict[str, Any] = json(await client.post("/v1/ingest", files={"image": image}, data=form), status)
    return found


async def test_image_is_indexed_once_with_all_its_parts(searching: httpx.AsyncClient) -> None:
    first = await ingest(searching, image_id="première 1.bmp", image_path="/x/1.bmp", metadata='{"place": "🚗 north"}')
    again = await ingest(searching, status=200, image_id="another")
    other = await ingest(searching, OTHER)
    replaced = await ingest(searching, scene("PNG", "green"), image_id="première 1.bmp")

    assert ({*first}, first["status"], first["image_id"]) == (KEYS, "success", "première 1.bmp")
    assert (first["num_detections"], first["num_faces"], first["errors"]) == (2, 2, None)
    assert first["indexed"] == {"global": True, "vehicles": 1, "people": 1, "faces": 2, "ocr": 1}
    assert first["ocr"] == {"num_texts": 1, "full_text": "r", "indexed": True}
    assert (first["imohash"], first["embedding_norm"] > 0) == (blake3(SCENE).hexdigest(), True)
    assert (again["status"], again["image_id"], again["indexed"]) == ("duplicate", "another", None)
    assert (again["existing_image_id"], again["existing_image_path"]) == ("première 1.bmp", "/x/1.bmp")
    assert (UUID(other["image_id"]).version, other["status"]) == (4, "success")
    assert replaced["status"] == "success"
    assert (await ingest(searching))["status"] == "success"  # the first one is no more


async def test_near_duplicates_are_grouped(searching: httpx.AsyncClient) -> None:
    await ingest(searching, image_id="one")
    first = (await ingest(searching, scene("PNG"), image_id="two"))["near_duplicate"]
    second = (await ingest(searching, scene("TIFF"), image_id="three"))["near_duplicate"]
    alone = await ingest(searching, scene("GIF"), detect_near_duplicates="false")

    assert first == {"action": "created_group", "group_id": first["group_id"], "similarity": 1.0, "matched_image": "one"}
    assert (second["action"], second["group_id"]) == ("joined_group", first["group_id"])
    assert alone["near_duplicate"] is None


async def test_parts_can_be_switched_off(searching: httpx.AsyncClient) -> None:
    off: dict[str, Any] = {"enable_ocr": "false", "enable_faces": "false"}
    plain = await ingest(searching, **off, enable_detection="false")
    objects = await ingest(searching, OTHER, **off, enable_clip="false")
    problem = await ingest(searching, scene("PNG"), 400, **off, enable_detection="false", enable_clip="false")

    nothing = {"global": False, "vehicles": 0, "people": 0, "faces": 0, "ocr": 0}
    assert (plain["indexed"], plain["ocr"], plain["num_detections"]) == ({**nothing, "global": True}, None, 0)
    assert (objects["indexed"], objects["num_detections"], objects["embedding_norm"]) == (nothing, 2, None)
    assert problem["detail"].startswith("there is nothing to be indexed")


async def test_part_whose_model_is_not_there_is_left_out(open_gateway: OpenGateway, postgres: Server, tmp_path: Path) -> None:
    """But not the vector of the image, without which it would not be found."""
    (tmp_path / "cascades.toml").write_text(MISSING)
    own = {"model_repository": str(tmp_path)}
    async with open_gateway(**own) as client:
        found = await ingest(client)
    own["task_models"] = "embedding=missing"
    async with open_gateway(**own) as client:
        indexed = await ingest(client, OTHER)  # by the model of the index
    async with postgres.fresh() as url, open_gateway(**own, database_url=url) as client:
        problem = json(await client.post("/ingest", content=SCENE), 404)

    assert (found["status"], found["indexed"]["global"], found["ocr"]) == ("success", True, None)
    assert sorted(error.partition(":")[0] for error in found["errors"]) == ["faces", "ocr"]
    assert (indexed["indexed"]["global"], problem["code"]) == (True, "unknown_model")
    assert "a default model of the settings" in problem["detail"]


async def test_thumbnails_are_kept_if_the_operator_wants_them(open_gateway: OpenGateway, own_engine: PostgresEngine) -> None:
    async with open_gateway(search_thumbnails=True) as client:
        await ingest(client, image_id="one")
    async with own_engine.as_owner() as connection:
        parts = [None, *await connection.fetchval("SELECT array_agg(part_id::text) FROM parts WHERE landmarks IS NOT NULL")]
    sizes = [Image.open(BytesIO(await own_engine.thumbnail("", "one", part))).size for part in parts]

    assert sizes[0] == (200, 100)
    assert np.array(sorted(height for _, height in sizes[1:])) == pytest.approx([50, 60], abs=2)


async def test_images_of_a_batch_succeed_or_fail_alone(searching: httpx.AsyncClient) -> None:
    await ingest(searching, image_id="known")
    images = [("images", (f"{index}.bmp", content)) for index, content in enumerate([SCENE, b"junk", OTHER, scene("PNG")])]
    form = {"image_ids": '["a", "b", null, "d"]', "image_paths": '[null, "/b", null, null]', "defer_heavy_ops": "true"}
    answer = json(await searching.post("/v1/ingest/batch", files=images, data=form), 201)

    assert ({*answer}, answer["status"], answer["deferred_ops"]) == (BATCH, "partial", 0)
    numbers = ("total", "processed", "duplicates", "errors_count", "near_duplicates")
    assert [answer[name] for name in numbers] == [4, 2, 1, 1, 1]
    assert answer["indexed"] == {"global": 2, "vehicles": 2, "people": 2, "faces": 4, "ocr": 2}
    assert answer["duplicate_details"] == [{"image_id": "a", "existing_image_id": "known", "imohash": blake3(SCENE).hexdigest()}]
    (error,) = answer["error_details"]
    assert (error["image_id"], error["index"], error["filename"], error["problem"]["status"]) == ("b", 1, "1.bmp", 415)
    (near,) = answer["near_duplicate_details"]
    assert (near["image_id"], near["matched_image"]) == ("d", "known")
    assert [*answer["image_ids"][:2], answer["image_ids"][3]] == ["a", "b", "d"]
    again = json(await searching.post("/ingest/batch", files=images[:1]))
    assert (again["status"], again["duplicates"]) == ("success", 1)


async def test_vector_of_embed_image_may_be_kept(searching: httpx.AsyncClient, client: httpx.AsyncClient) -> None:
    kept = json(await searching.post("/embed/image?index=true&image_id=mine", content=SCENE))
    again = json(await searching.post("/embed/image?index=true", content=SCENE))
    plain = json(await searching.post("/embed/image?image_id=mine", content=SCENE))

    indexed = [(each["indexed"], each["image_id"]) for each in (kept, again, plain)]
    assert indexed == [(True, "mine"), (True, "mine"), (False, "mine")]
    assert kept["embedding"] == plain["embedding"]
    assert json(await client.post("/embed/image?index=true", content=SCENE), 404)["code"] == "not_offered"
    assert json(await searching.post("/embed/image?index=true&image_id=%01", content=OTHER), 400)["code"] == "invalid_parameter"
