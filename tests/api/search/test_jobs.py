"""POST /ingest/directory, /search/reindex and GET /ingest/jobs: work that goes on without a request."""

import os
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.search.postgres.engine import PostgresEngine
from tests.api.search.conftest import OpenGateway
from tests.fakes.models import scene
from tests.support import SCENE, json

OTHER = scene("BMP", background="yellow", shift=10)
QUICK: dict[str, Any] = {"enable_ocr": "false", "enable_faces": "false", "enable_detection": "false"}


async def index(client: httpx.AsyncClient, folder: Path, status: int = 201, **given: str) -> Any:  # noqa: ANN401
    return json(await client.post("/v1/ingest/directory", params={"directory": str(folder), **given}), status)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with two images, one of them twice, what is no image, and what leads out of it."""
    photos, outside = tmp_path / "photos", tmp_path.parent / f"{tmp_path.name}-outside"
    (photos / "inner").mkdir(parents=True)
    for path, content in {"a.bmp": SCENE, "b.PNG": b"junk", "inner/c.bmp": OTHER, "inner/d.bmp": SCENE, "e.txt": b"text"}.items():
        (photos / path).write_bytes(content)
    outside.mkdir()
    (outside / "secret.bmp").write_bytes(scene("BMP", "green"))
    (photos / "linked").symlink_to(outside)
    (photos / "link.bmp").symlink_to(outside / "secret.bmp")
    os.mkfifo(photos / "pipe.bmp")
    return photos


async def test_images_of_a_folder_are_indexed(searching: httpx.AsyncClient, photos: Path) -> None:
    """Those that fail are counted; nothing outside of the folder is read, and nothing waits for a pipe."""
    answer = await index(searching, photos, batch_size="8")
    job = json(await searching.get(f"/v1/ingest/jobs/{answer['job_id']}"))
    again = await index(searching, photos, max_images="2", **QUICK)
    listed = json(await searching.get("/ingest/jobs?size=1&page=0"))
    begun = await index(searching, photos, 202, wait="false", **QUICK)

    numbers = ("total_files", "total", "processed", "duplicates", "errors_count", "near_duplicates")
    assert [answer[name] for name in numbers] == [6, 6, 2, 1, 3, 0]
    assert (answer["status"], answer["state"], answer["error"], answer["directory"]) == ("partial", "done", None, str(photos))
    assert answer["failures"] == {"not_readable": 2, "unsupported_format": 1}
    assert answer["skipped_extensions"] == [".txt"]
    assert job == answer
    assert [again[name] for name in numbers] == [2, 2, 0, 1, 1, 0]
    assert (listed["total"], [each["job_id"] for each in listed["jobs"]]) == (2, [again["job_id"]])
    assert (begun["state"], begun["ended_at"]) == ("waiting", None)


async def test_only_allowed_folders_are_indexed(open_gateway: OpenGateway, tmp_path: Path, photos: Path) -> None:
    """Images of the same name in two of them are two."""
    (photos / "inner" / "c.bmp").rename(photos / "inner" / "a.bmp")
    async with open_gateway(search_folders=f"{photos},{photos}/inner") as client:
        for folder in (tmp_path, Path(f"{photos}/.."), photos / "linked", photos / "a.bmp"):
            assert (await index(client, folder, 400))["code"] == "invalid_parameter"
        for folder in (photos, photos / "inner"):
            await index(client, folder, recursive="false", **QUICK)
        assert json(await client.get("/query/stats"))["indexes"][0]["doc_count"] == 2
    async with open_gateway(search_folders="") as client:
        assert (await index(client, photos, 404))["code"] == "not_offered"


async def test_index_is_made_anew_with_another_model(open_gateway: OpenGateway, own_engine: PostgresEngine, tmp_path: Path) -> None:
    """Beside the old vectors; which stay in use while images cannot be read again, and until all have new ones."""
    (tmp_path / "a.bmp").write_bytes(SCENE)
    async with open_gateway(faces=False) as client:  # whose model is the other one
        await index(client, tmp_path)
        json(await client.post("/ingest?image_id=lost", content=scene("PNG", "green")), 201)
        assert "embedding:1" in json(await client.post("/search/reindex"), 400)["detail"]
    async with open_gateway(faces=False, task_models="embedding=faces_description") as client:
        failed = json(await client.post("/v1/search/reindex", json={"family": "image"}))
        used = await own_engine.models("image")
        json(await client.post("/ingest?image_id=new", content=scene("PNG", "red")), 201)
        missing = await own_engine.images_without("image", "", 10)
        json(await client.post("/ingest?image_id=lost&skip_duplicates=false", content=scene("BMP", "green")), 201)
        done = json(await client.post("/search/reindex"), 201)
        switched = await own_engine.models("image")

    assert (failed["state"], failed["processed"], failed["unreadable"]) == ("failed", 1, 1)
    assert "1 images cannot be read again" in failed["error"]
    assert (used.active, used.next) == ("embedding:1", "faces_description:1")
    assert missing == [("", "lost", None)]
    assert (done["state"], done["unreadable"]) == ("done", 0)
    assert (switched.active, switched.next) == ("faces_description:1", None)
