"""POST /ingest/directory, /search/reindex and GET /ingest/jobs: work that goes on without a request."""

import asyncio
import os
from collections.abc import Sequence
from errno import EACCES, EIO
from itertools import count
from pathlib import Path
from threading import Event
from typing import Any

import httpx
import pytest

from app.errors import InferenceFailed, TritonUnavailable
from app.search.describe import Describer
from app.search.engine import Page
from app.search.files import Files
from app.search.postgres.engine import PostgresEngine
from app.search.service import Search
from tests.api.search.conftest import OpenGateway
from tests.fakes.models import scene
from tests.support import SCENE, json, until

OTHER = scene("BMP", background="yellow", shift=10)
QUICK: dict[str, Any] = {"enable_ocr": "false", "enable_faces": "false", "enable_detection": "false"}


async def index(client: httpx.AsyncClient, folder: Path, status: int = 201, **given: str) -> Any:  # noqa: ANN401
    return json(await client.post("/v1/ingest/directory", params={"directory": str(folder), **given}), status)


@pytest.fixture
def photos(tmp_path: Path) -> Path:
    """A folder with two images, one of them twice, what is no image, what leads out of it, and what other programs leave there."""
    photos, outside = tmp_path / "photos", tmp_path.parent / f"{tmp_path.name}-outside"
    (photos / "inner").mkdir(parents=True)
    for path, content in {"a.bmp": SCENE, "b.PNG": b"junk", "inner/c.bmp": OTHER, "inner/d.bmp": SCENE, "e.txt": b"text"}.items():
        (photos / path).write_bytes(content)
    for path in ("@eaDir/a.bmp", ".hidden/a.bmp", "._a.bmp"):
        (photos / path).parent.mkdir(exist_ok=True)
        (photos / path).write_bytes(scene("BMP", "red"))
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
    failures = json(await searching.get(f"/v1/ingest/jobs/{answer['job_id']}/failures?size=2&page=1"))
    again = await index(searching, photos, max_images="2", **QUICK)
    listed = json(await searching.get("/ingest/jobs?size=1&page=0"))
    (photos / "inner" / "c.bmp").rename(photos / "inner" / "moved.bmp")
    moved = await index(searching, photos, **QUICK)
    (hit,) = json(await searching.post("/search/image?top_k=1", content=OTHER))["results"]
    begun = await index(searching, photos, 202, wait="false", **QUICK)

    numbers = ("total_files", "total", "processed", "duplicates", "errors_count", "near_duplicates")
    assert [answer[name] for name in numbers] == [6, 6, 2, 1, 3, 0]
    assert (answer["status"], answer["state"], answer["error"], answer["directory"]) == ("partial", "done", None, str(photos))
    assert answer["failures"] == {"not_readable": 2, "unsupported_format": 1}
    assert (answer["skipped_extensions"], answer["excluded"]) == ([".txt"], 3)
    assert (failures["total"], [(one["name"], one["code"]) for one in failures["failures"]]) == (
        3,
        [(f"{photos}/pipe.bmp", "not_readable")],
    )
    assert job == answer
    assert [again[name] for name in numbers] == [2, 2, 0, 1, 1, 0]
    assert (listed["total"], [each["job_id"] for each in listed["jobs"]]) == (2, [again["job_id"]])
    assert (moved["updated"], hit["image_path"]) == (1, f"{photos}/inner/moved.bmp")
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


async def test_moved_file_has_its_new_name(searching: httpx.AsyncClient, tmp_path: Path) -> None:
    """Also if another one has taken its place, or it takes that of another one. A copy changes nothing."""
    for name, content in {"latest": SCENE, "other": OTHER, "over": scene("BMP", "red")}.items():
        (tmp_path / f"{name}.bmp").write_bytes(content)
    await index(searching, tmp_path, **QUICK)
    (tmp_path / "latest.bmp").rename(tmp_path / "archive.bmp")
    (tmp_path / "latest.bmp").write_bytes(scene("BMP", "green"))
    (tmp_path / "other.bmp").rename(tmp_path / "over.bmp")
    again = await index(searching, tmp_path, **QUICK)
    (tmp_path / "copy.bmp").write_bytes(OTHER)
    assert (await index(searching, tmp_path, **QUICK))["updated"] == 0
    hits = json(await searching.post("/search/image?top_k=9&min_score=0", content=SCENE))["results"]
    names = ("archive.bmp", "latest.bmp", "over.bmp")
    assert {(hit["image_id"], hit["image_path"]) for hit in hits} == {(name, str(tmp_path / name)) for name in names}
    assert again["processed"] + again["duplicates"] == 3


async def test_dead_disk_delays_no_other_request(open_gateway: OpenGateway, photos: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    is_back, allowed = Event(), Files._allowed  # noqa: SLF001
    monkeypatch.setattr("app.search.files._PATIENCE_SECONDS", 0.5)
    monkeypatch.setattr(Files, "_allowed", lambda self, path: allowed(self, path) if path != str(photos) else is_back.wait())
    async with open_gateway(search_folders=f"{photos},{photos}/inner") as client:
        late = await asyncio.gather(*(index(client, photos, 503) for _ in range(40)))
        json(await client.post("/ingest", content=SCENE + bytes(2**21)), 201)
        await index(client, photos / "inner", **QUICK)
        is_back.set()
    assert {problem["code"] for problem in late} == {"search_unavailable"}


async def test_file_or_folder_that_cannot_be_read_fails_alone(
    searching: httpx.AsyncClient, photos: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that has an error, or does not answer, is waited for."""
    read, scan, is_over = Files._read, os.scandir, Event()  # noqa: SLF001
    errors = [PermissionError(EACCES, "", f"{photos}/inner"), OSError(EIO, ""), None]

    def scan_inner(folder: Any) -> Any:  # noqa: ANN401
        if errors and str(folder).endswith("inner"):
            if error := errors.pop():
                raise error
            is_over.wait()
        return scan(folder)

    for limit, seconds in {"files._PATIENCE": 0.5, "files._LISTING": 0.5, "jobs._PAUSE": 0, "jobs._POLL": 0.01}.items():
        monkeypatch.setattr(f"app.search.{limit}_SECONDS", seconds)
    monkeypatch.setattr(os, "scandir", scan_inner)
    monkeypatch.setattr(Files, "_read", lambda self, path: is_over.wait() if path.endswith("b.PNG") else read(self, path))
    answer = await index(searching, photos, **QUICK)
    failures = json(await searching.get(f"/v1/ingest/jobs/{answer['job_id']}/failures"))["failures"]
    is_over.set()

    assert (answer["processed"], answer["unreadable"], errors) == (1, 1, [])
    assert [each["name"].removeprefix(f"{photos}/") for each in failures] == ["b.PNG", "inner", "link.bmp", "pipe.bmp"]


async def test_file_that_ends_its_process_is_tried_three_times(
    open_gateway: OpenGateway, own_engine: PostgresEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those after it go one by one. An outage is waited for; a job whose folder is on another machine is left to that."""
    names, begun_at = ("a.bmp", "b.bmp", "c.bmp"), list[str]()
    for name in names:
        (tmp_path / name).write_bytes(SCENE)
    options = {"directory": str(tmp_path), "recursive": True, "max_images": None, "ingest": [[True] * 4, True, None]}
    foreign = await own_engine.add_job("", "directory", options, {str(tmp_path): os.stat(tmp_path).st_ino})  # noqa: PTH116
    job = await own_engine.add_job("", "directory", options, await Files([tmp_path], (), 0).identify([str(tmp_path)]))
    for _ in range(4):
        await own_engine.claim_job(job.job_id, 0)
    away = [TritonUnavailable("away") for _ in range(200)]
    ingest = Search.ingest

    async def ingest_later(*given: Any, **more: Any) -> Any:  # noqa: ANN401 - those of the method
        if away:
            raise away.pop()
        begun_at.append((await own_engine.job("", job.job_id)).position[-5:])
        return await ingest(*given, **more)

    for limit, seconds in {"_PAUSE_SECONDS": 0, "_LEASE_SECONDS": 0, "_POLL_SECONDS": 0.01}.items():
        monkeypatch.setattr(f"app.search.jobs.{limit}", seconds)
    monkeypatch.setattr(Search, "ingest", ingest_later)
    async with open_gateway() as client:

        async def is_done() -> bool:
            return (await own_engine.job("", job.job_id)).state == "done"

        await until(is_done)
        waiting = json(await client.get(f"/ingest/jobs/{foreign.job_id}"))
        for status in (200, 404):
            json(await client.delete(f"/ingest/jobs/{foreign.job_id}"), status)
    ended = await own_engine.job("", job.job_id)
    assert (ended.counts["processed"], ended.counts["duplicates"], begun_at) == (1, 1, [*names[:2]])
    assert [(one.name, one.code) for one in (await own_engine.failures("", job.job_id, Page(9))).items] == [
        (str(tmp_path / "a.bmp"), "process_ended")
    ]
    assert (waiting["state"], waiting["status"], waiting["error"].endswith("DELETE gives it up")) == ("waiting", "success", True)
    assert (await own_engine.job("", foreign.job_id)).state == "failed"


async def test_index_is_made_anew_with_another_model(
    open_gateway: OpenGateway, own_engine: PostgresEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside the old vectors, which stay in use until all images have new ones, but for as many as may be lost."""
    (tmp_path / "a.bmp").write_bytes(SCENE)
    async with open_gateway(faces=False) as client:  # whose model is the other one
        await index(client, tmp_path)
        for image_id, colour in (("lost", "green"), ("kept", "blue")):
            json(await client.post(f"/ingest?image_id={image_id}", content=scene("PNG", colour)), 201)
        assert "embedding:1" in json(await client.post("/search/reindex"), 400)["detail"]
    identify, asked = Files.identify, count(1)
    async with open_gateway(faces=False, task_models="embedding=faces_description") as client:

        async def reindex(**given: object) -> tuple[Any, ...]:
            answer = json(await client.post("/v1/search/reindex", json=given), 201 if given.get("allow_missing") == 1 else 200)
            failures = json(await client.get(f"/ingest/jobs/{answer['job_id']}/failures"))["failures"]
            codes = {each["code"] for each in failures}
            return answer["state"], answer["processed"], answer["errors_count"], answer["unreadable"], answer["error"], codes

        async def identify_later(self: Files, folders: Sequence[str]) -> dict[str, int]:
            if next(asked) == 3:  # before the end: until then, there was another disk
                (tmp_path / "a").rename(tmp_path / "a.bmp")
                return {}
            return await identify(self, folders)

        with monkeypatch.context() as patch:
            patch.setattr(Describer, "describe_parts", failing)
            broken = await reindex(allow_missing=100)
        assert broken[:4] == ("failed", 0, 1, 2)
        assert "1 images could not be described" in broken[4]
        (tmp_path / "a.bmp").rename(tmp_path / "a")
        with monkeypatch.context() as patch:
            patch.setattr("app.search.jobs._PAUSE_SECONDS", 0)
            patch.setattr(Files, "identify", identify_later)
            gone = await reindex()
        assert (gone[:4], gone[5]) == (("failed", 1, 0, 2), {"gone"})
        assert "allow_missing=2" in gone[4]
        assert "register" not in gone[4]
        assert await own_engine.models("image") == ("embedding:1", "faces_description:1")
        json(await client.post("/ingest?image_id=deepstack-face-new", content=scene("PNG", "red")), 201)
        json(await client.delete("/search/reindex/image"))
        assert await own_engine.models("image") == ("embedding:1", None)
        json(await client.delete("/search/reindex/image"), 404)
        assert "register again those that are registered faces (1)" in (await reindex())[4]
        json(await client.delete("/query/image/deepstack-face-new"))
        json(await client.post("/ingest", content=scene("PNG", "blue")))
        assert await reindex(allow_missing=1) == ("done", 0, 0, 1, None, {"gone"})
        assert await own_engine.models("image") == ("faces_description:1", None)
        assert {hit["image_id"] for hit in json(await client.post("/search/image?min_score=0", content=SCENE))["results"]} == {
            *("a.bmp", "kept")
        }
        assert json(await client.get("/query/image/kept"))["parts"]["embedding"]["model"] == "faces_description:1"
        assert "were lost" in json(await client.get("/query/image/lost"))["parts"]["embedding"]["why"]
        assert json(await client.post("/ingest", content=scene("PNG", "green")))["is_completed"]
        assert json(await client.get("/query/image/lost"))["parts"]["embedding"]["state"] == "there"


async def failing(*_: object) -> None:
    raise InferenceFailed("the model is broken")


async def test_broken_next_model_fails_no_image(open_gateway: OpenGateway, own_engine: PostgresEngine) -> None:
    async with open_gateway() as client:
        json(await client.post("/ingest", content=SCENE), 201)
        await own_engine.add_job("", "reindex", {"family": "image", "model": "embedding:7"}, {}, 64)
        answer = json(await client.post("/ingest", content=OTHER), 201)
        known = json(await client.post("/ingest", content=SCENE))
        advice = json(await client.post("/search/reindex"), 400)["detail"]
        assert advice.endswith("DELETE /search/reindex/image gives up the change to embedding:7")
        json(await client.delete("/search/reindex/image"))
        assert json(await client.post("/search/reindex"), 400)["detail"].endswith("there is nothing to do")
    assert known["status"] == "duplicate"
    assert all("version 7" in each["errors"][0] for each in (answer, known))
