"""POST /ingest and /ingest/batch: what is kept of images, in a real PostgreSQL."""

from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import UUID

import httpx
import msgspec
import numpy as np
import pytest
from blake3 import blake3
from PIL import Image

from app.search.postgres.engine import PostgresEngine
from app.settings.schema import Settings
from tests.api.conftest import write_keys
from tests.fakes.models import scene
from tests.postgres import Server
from tests.search.made import gateway_of
from tests.support import SCENE, json

OTHER = scene("BMP", background="yellow", shift=10)
KEYS = {"status", "image_id", "num_detections", "num_faces", "embedding_norm", "imohash", "indexed", "near_duplicate", "ocr"} | {
    *("existing_image_id", "existing_image_path", "message", "error", "errors", "total_time_ms", "request_id")
}
BATCH = {"status", "total", "processed", "duplicates", "errors_count", "indexed", "near_duplicates", "deferred_ops"} | {
    *("duplicate_details", "error_details", "near_duplicate_details", "image_ids", "total_time_ms", "request_id")
}


async def ingest(client: httpx.AsyncClient, image: bytes = SCENE, status: int = 201, **form: Any) -> dict[str, Any]:  # noqa: ANN401 - fields
    found: dict[str, Any] = json(await client.post("/v1/ingest", files={"image": image}, data=form), status)
    return found


async def test_an_image_is_indexed_once_with_all_its_parts(searching: httpx.AsyncClient) -> None:
    first = await ingest(searching, image_id="première 1.bmp", image_path="/x/1.bmp", metadata='{"place": "north"}')
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
    first = await ingest(searching, scene("PNG"), image_id="two")
    second = await ingest(searching, scene("TIFF"), image_id="three")
    alone = await ingest(searching, scene("GIF"), detect_near_duplicates="false")

    near = first["near_duplicate"]
    assert near == {"action": "created_group", "group_id": near["group_id"], "similarity": 1.0, "matched_image": "one"}
    assert (second["near_duplicate"]["action"], second["near_duplicate"]["group_id"]) == ("joined_group", near["group_id"])
    assert alone["near_duplicate"] is None


async def test_parts_can_be_switched_off(searching: httpx.AsyncClient) -> None:
    off: dict[str, Any] = {"enable_ocr": "false", "enable_faces": "false"}
    plain = await ingest(searching, **off, enable_detection="false")
    objects = await ingest(searching, OTHER, **off, enable_clip="false")
    nothing = {**off, "enable_detection": "false", "enable_clip": "false"}
    problem = json(await searching.post("/ingest", files={"image": scene("PNG")}, data=nothing), 400)

    assert plain["indexed"] == {"global": True, "vehicles": 0, "people": 0, "faces": 0, "ocr": 0}
    assert (plain["ocr"], plain["num_detections"]) == (None, 0)
    assert (objects["num_detections"], objects["embedding_norm"]) == (2, None)
    assert objects["indexed"] == {"global": False, "vehicles": 0, "people": 0, "faces": 0, "ocr": 0}
    assert problem["detail"].startswith("there is nothing to be indexed")


async def test_a_part_whose_model_is_not_there_is_left_out(search_settings: Settings, postgres: Server, tmp_path: Path) -> None:
    """But not the vector of the image, without which it would not be found."""
    (tmp_path / "cascades.toml").write_text(
        '[ocr.steps.lines]\nmodel = "missing"\n[ocr.steps.text]\nmodel = "ocr_recognition"\nof = "lines"\ncrop = "corners"\n'
        '[faces.steps.faces]\nmodel = "other"\n[faces.steps.descriptions]\nmodel = "faces_description"\nof = "faces"\n'
    )
    own = msgspec.structs.replace(search_settings, model_repository=str(tmp_path))
    async with gateway_of(own) as client:
        found = await ingest(client)
    missing = msgspec.structs.replace(own, task_models="embedding=missing")
    async with gateway_of(missing) as client:
        indexed = await ingest(client, OTHER)  # by the model of the index
    async with postgres.fresh() as url, gateway_of(msgspec.structs.replace(missing, database_url=url)) as client:
        problem = json(await client.post("/ingest", content=SCENE), 404)

    assert (found["status"], found["indexed"]["global"], found["ocr"]) == ("success", True, None)
    assert sorted(error.partition(":")[0] for error in found["errors"]) == ["faces", "ocr"]
    assert (indexed["indexed"]["global"], problem["code"]) == (True, "unknown_model")
    assert "a default model of the settings" in problem["detail"]


async def test_thumbnails_are_kept_if_the_operator_wants_them(search_settings: Settings) -> None:
    async with gateway_of(msgspec.structs.replace(search_settings, search_thumbnails=True)) as client:
        await ingest(client, image_id="one")
    engine = PostgresEngine(search_settings.database_url)
    async with engine.as_owner() as connection:
        parts = [None, *await connection.fetchval("SELECT array_agg(part_id::text) FROM parts WHERE landmarks IS NOT NULL")]
    pictures = [Image.open(BytesIO(await engine.thumbnail("", "one", part))) for part in parts]
    await engine.close()
    assert pictures[0].size == (200, 100)
    assert np.array(sorted(picture.size[1] for picture in pictures[1:])) == pytest.approx([50, 60], abs=2)


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


DEEP = '{"a": ' * 5000 + "1" + "}" * 5000


BAD: list[dict[str, str]] = [
    *({"image_id": value} for value in ("", "x" * 257, "a\nb", "a\0")),
    *(
        {"metadata": value}
        for value in ("[1]", '{"a": NaN}', '{"a": "\\u0000"}', '{"a": "\\ud800"}', DEEP, '"' + "x" * 40_000 + '"')
    ),
    {"image_path": "\x07"},
    {"near_duplicate_threshold": "nan"},
    {"near_duplicate_threshold": "0.5"},
    {"unheard_of": "1"},
]
BAD_BATCH = [{"image_ids": value} for value in ('["a"]', "[1, 2]", '["a", ""]', "{}", "x" * 40_000)]


async def test_bad_parameters_are_rejected(searching: httpx.AsyncClient) -> None:
    files = [("images", SCENE), ("images", OTHER)]
    asked = [await searching.post("/ingest", files={"image": SCENE}, data=form) for form in BAD]
    asked += [await searching.post("/ingest/batch", files=files, data=form) for form in BAD_BATCH]

    assert [(each.status_code, each.json()["code"]) for each in asked] == [(400, "invalid_parameter")] * len(asked)
    assert (await ingest(searching, metadata=r'{"\\u0000 is a text": "🚗 \u202e"}'))["status"] == "success"


async def test_the_vector_of_embed_image_may_be_kept(searching: httpx.AsyncClient, client: httpx.AsyncClient) -> None:
    kept = json(await searching.post("/embed/image?index=true&image_id=mine", content=SCENE))
    again = json(await searching.post("/embed/image?index=true", content=SCENE))
    plain = json(await searching.post("/embed/image?image_id=mine", content=SCENE))
    problem = json(await client.post("/embed/image?index=true", content=SCENE), 404)

    assert [(each["indexed"], each["image_id"]) for each in (kept, again, plain)] == [
        (True, "mine"),
        (True, "mine"),
        (False, "mine"),
    ]
    assert kept["embedding"] == plain["embedding"]
    assert problem["code"] == "not_offered"
    assert json(await searching.post("/embed/image?index=true&image_id=%01", content=OTHER), 400)["code"] == "invalid_parameter"


async def test_adding_images_needs_a_scope_and_stays_within_a_tenant(search_settings: Settings, tmp_path: Path) -> None:
    scopes = {"camera": "detect", "north": "detect ingest", "south": "ingest"}
    file = write_keys(tmp_path, *((id_, "secret", scope) for id_, scope in scopes.items()), tenants={"south": "south"})
    async with gateway_of(msgspec.structs.replace(search_settings, api_keys_file=file)) as client:

        async def post(path: str, key: str) -> httpx.Response:
            return await client.post(path, content=SCENE, headers={"X-API-Key": f"{key}.secret"})

        for path in ("/ingest", "/embed/image?index=true", "/ingest/directory"):
            assert json(await post(path, "camera"), 403)["code"] == "forbidden"
        assert json(await post("/ingest?image_id=n", "north"), 201)["status"] == "success"
        assert json(await post("/embed/image?index=true", "north"))["image_id"] == "n"
        assert json(await post("/ingest?image_id=s", "south"), 201)["status"] == "success"


async def test_the_document_tells_what_a_status_means(searching: httpx.AsyncClient) -> None:
    paths = json(await searching.get("/search/docs/openapi.json"))["paths"]
    routes = ("/ingest", "/ingest/batch", "/ingest/directory", "/search/reindex")
    found = [sorted(status for status in paths[path]["post"]["responses"] if status < "400") for path in routes]

    assert found == [["200", "201"], ["200", "201"], ["200", "201", "202"], ["200", "201", "202"]]


async def test_an_image_is_not_added_where_its_index_would_be_damaged(
    searching: httpx.AsyncClient, search_settings: Settings, postgres: Server
) -> None:
    await postgres.pretend(search_settings.database_url, "0.8.2")
    problem = json(await searching.post("/v1/ingest", files={"image": SCENE}), 503)
    assert problem["code"] == "index_refused"
    assert problem["detail"].startswith("pgvector 0.8.2 can damage an index of vectors")
    assert "install pgvector 0.8.4 or later" in problem["detail"]
    assert json(await searching.post("/search/image", content=SCENE))["total_results"] == 0
    assert json(await searching.post("/detect", content=SCENE))["num_detections"] == 2
