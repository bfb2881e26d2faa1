"""POST /ingest/directory, /search/reindex and GET /ingest/jobs: work that goes on without a request."""

import asyncio
import os
from pathlib import Path
from threading import Semaphore
from typing import Any

import httpx
import msgspec
import pytest

from app.search import jobs
from app.search.engine import Job, Page
from app.search.jobs import DirectoryOptions
from app.search.postgres.engine import PostgresEngine
from app.search.service import IngestOptions
from tests.api.search.conftest import OpenGateway
from tests.fakes.models import scene
from tests.processes import PATIENCE_SECONDS
from tests.support import SCENE, json

OTHER = scene("BMP", background="yellow", shift=10)
QUICK: dict[str, Any] = {"enable_ocr": "false", "enable_faces": "false", "enable_detection": "false"}


async def index(client: httpx.AsyncClient, folder: Path, status: int = 201, **given: str) -> dict[str, Any]:
    job: dict[str, Any] = json(await client.post("/v1/ingest/directory", params={"directory": str(folder), **given}), status)
    return job


async def ending(client: httpx.AsyncClient, job: Job) -> dict[str, Any]:
    ended: dict[str, Any] = {}
    while ended.get("state") not in {"done", "failed"}:
        ended = json(await client.get(f"/ingest/jobs/{job.job_id}"))
    return ended


def options_of(folder: Path) -> Any:  # noqa: ANN401 - JSON
    return msgspec.to_builtins(DirectoryOptions(str(folder), recursive=True, max_images=None, ingest=IngestOptions()))


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
    listed, older = [json(await searching.get(f"/ingest/jobs?size=1&page={page}")) for page in (0, 1)]
    begun = await index(searching, photos, 202, wait="false", **QUICK)
    after = json(await searching.post("/ingest/directory", json={"directory": str(photos), "timeout_ms": 20_000, **QUICK}), 201)

    numbers = ("total_files", "total", "processed", "duplicates", "errors_count", "near_duplicates")
    assert [answer[name] for name in numbers] == [6, 6, 2, 1, 3, 0]
    assert (answer["status"], answer["state"], answer["error"], answer["directory"]) == ("partial", "done", None, str(photos))
    assert answer["indexed"] == {"global": 2, "vehicles": 2, "people": 2, "faces": 4, "ocr": 2}
    assert answer["failures"] == {"not_readable": 2, "unsupported_format": 1}
    assert answer["skipped_extensions"] == [".txt"]
    assert job == answer
    assert [again[name] for name in numbers] == [2, 2, 0, 1, 1, 0]
    assert (listed["total"], [each["job_id"] for each in listed["jobs"]]) == (2, [again["job_id"]])
    assert [each["job_id"] for each in older["jobs"]] == [answer["job_id"]]
    assert (begun["state"], begun["ended_at"], after["duplicates"]) == ("waiting", None, 3)


async def test_only_some_folders_may_be_indexed(open_gateway: OpenGateway, tmp_path: Path, photos: Path) -> None:
    """Images of the same name in two of them are two."""
    (photos / "inner" / "c.bmp").rename(photos / "inner" / "a.bmp")
    async with open_gateway(search_folders=f"{photos},{photos}/inner") as client:
        for directory in (tmp_path, f"{photos}/..", photos / "linked", photos / "a.bmp"):
            assert (await index(client, Path(directory), 400))["code"] == "invalid_parameter"
        for folder in (photos, photos / "inner"):
            await index(client, folder, recursive="false", **QUICK)
        assert json(await client.get("/query/stats"))["indexes"][0]["doc_count"] == 2
        unknown = json(await client.get("/ingest/jobs/8e7b9f3c-0d5c-4f57-9c8c-6f4f0c3b8d11"), 404)
    async with open_gateway(search_folders="") as client:
        problem = await index(client, photos, 404)

    assert unknown["code"] == "unknown_record"
    assert (problem["code"], "NEREID_SEARCH_FOLDERS" in problem["detail"]) == ("not_offered", True)


async def test_another_worker_goes_on_where_one_has_died(
    open_gateway: OpenGateway, own_engine: PostgresEngine, tmp_path: Path
) -> None:
    """A job of 130 images whose worker has saved the first two chunks, and then nothing more."""
    for number in range(130):
        (tmp_path / f"{number:03}.bmp").write_bytes(b"junk" if number < 128 else scene("BMP", shift=number - 120))
    await own_engine.add_job("", "directory", options_of(tmp_path))
    dead = await own_engine.claim_job(60)
    assert dead is not None
    dead.position, dead.counts = str(tmp_path / "127.bmp"), {"processed": 128, "total_files": 130}
    assert await own_engine.save_job(dead)
    dead.state = "waiting"  # as after the time in which it should have been saved
    assert await own_engine.save_job(dead)
    async with open_gateway() as client:
        ended = await ending(client, dead)
    assert (ended["total"], ended["processed"], ended["errors_count"]) == (130, 130, 0)
    assert not await own_engine.save_job(dead)


async def test_index_is_made_anew_with_another_model(open_gateway: OpenGateway, own_engine: PostgresEngine, tmp_path: Path) -> None:
    """Beside the old vectors; which stay in use while images cannot be read again, and until all have new ones."""
    for name, content in {"a.bmp": SCENE, "b.bmp": OTHER}.items():
        (tmp_path / name).write_bytes(content)
    async with open_gateway(faces=False) as client:  # whose model is the other one
        nothing = json(await client.post("/search/reindex"), 400)
        await index(client, tmp_path)
        json(await client.post("/ingest?image_id=lost", content=scene("PNG", "green")), 201)
        same = json(await client.post("/search/reindex"), 400)
    async with open_gateway(faces=False, task_models="embedding=faces_description") as client:
        failed = json(await client.post("/v1/search/reindex", json={"family": "image"}))
        used = await own_engine.models("image")
        json(await client.post("/ingest?image_id=new", content=scene("PNG", "red")), 201)
        both = (await own_engine.images_without("image", "", 10), await own_engine.models("image"))
        json(await client.post("/ingest?image_id=lost&skip_duplicates=false", content=scene("BMP", "green")), 201)
        done = json(await client.post("/search/reindex"), 201)
        switched = await own_engine.models("image")
        json(await client.post("/ingest?image_id=last", content=scene("PNG", "yellow")), 201)
        again = json(await client.post("/search/reindex?family=image"), 400)
    counts = {each.name: each.records for each in await own_engine.statistics("")}

    assert "no vectors yet" in nothing["detail"]
    assert "embedding:1" in same["detail"]
    assert (failed["state"], failed["processed"], failed["unreadable"]) == ("failed", 2, 1)
    assert "1 images cannot be read again" in failed["error"]
    assert (used.active, used.next) == ("embedding:1", "faces_description:1")
    assert both == ([("", "lost", None)], used)
    assert (done["state"], done["processed"], done["unreadable"]) == ("done", 0, 0)
    assert (switched.active, switched.next, again["code"]) == ("faces_description:1", None, "invalid_parameter")
    assert (counts["global"], counts["vehicles"], (await own_engine.jobs("", Page(10))).total) == (5, 5, 3)


async def test_another_change_of_the_model_takes_the_place_of_one(open_gateway: OpenGateway, own_engine: PostgresEngine) -> None:
    """One that is repeated after its worker has died when it had switched has succeeded."""
    async with open_gateway(faces=False) as client:
        json(await client.post("/ingest", content=SCENE, params=QUICK), 201)
    await own_engine.begin_model("image", "unwanted:1", 8)
    async with open_gateway(faces=False, task_models="embedding=faces_description") as client:
        failed = json(await client.post("/search/reindex"))
        used = await own_engine.models("image")
        await own_engine.end_model("image", switch=True)
        options = msgspec.to_builtins(jobs.ReindexOptions("image", "faces_description:1", allow_missing=False))
        ended = await ending(client, await own_engine.add_job("", "reindex", options))

    assert (failed["unreadable"], used.next) == (1, "faces_description:1")
    assert (ended["state"], ended["error"]) == ("done", None)


async def test_worker_keeps_a_job_while_it_lists_a_large_folder(
    open_gateway: OpenGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It goes on saving it. Otherwise several workers would take it from each other forever."""
    monkeypatch.setattr(jobs, "_BEAT_SECONDS", 0.05)
    saves, saved, lists = PostgresEngine.save_job, Semaphore(0), jobs.list_images

    async def save_and_note(engine: PostgresEngine, job: Job) -> bool:
        is_kept = await saves(engine, job)
        saved.release()
        return is_kept

    def list_slowly(directory: Path, *, recursive: bool) -> object:
        assert all(saved.acquire(timeout=PATIENCE_SECONDS) for _ in range(3))
        return lists(directory, recursive=recursive)

    monkeypatch.setattr(PostgresEngine, "save_job", save_and_note)
    monkeypatch.setattr(jobs, "list_images", list_slowly)
    async with open_gateway() as client:
        assert (await index(client, tmp_path))["state"] == "done"


async def test_jobs_of_two_tenants_take_turns(
    open_gateway: OpenGateway, own_engine: PostgresEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a large folder would keep all others waiting."""
    read, reads = list[str](), jobs.read_allowed

    def note(path: str, *others: Any) -> bytes | None:  # noqa: ANN401 - those of the function
        read.append(Path(path).parent.name)
        return reads(path, *others)

    for name, value in {"CHUNK": 1, "_TURN_SECONDS": 0.0, "monotonic": lambda: 0.0, "read_allowed": note}.items():
        monkeypatch.setattr(jobs, name, value)
    added = []
    for tenant in ("north", "south"):
        (tmp_path / tenant).mkdir()
        for name in "abc":
            (tmp_path / tenant / f"{name}.bmp").write_bytes(b"junk")
        added.append(await own_engine.add_job(tenant, "directory", options_of(tmp_path / tenant)))
    async with open_gateway():
        for job in added:
            while (await own_engine.job(job.tenant, job.job_id)).state != "done":  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)

    assert read == ["north", "south"] * 3


async def test_shutdown_cancels_the_work_on_images_of_a_job(
    open_gateway: OpenGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another worker goes on with the job: what the first one has begun must not be added beside it."""
    is_reading, may_read, reads = Semaphore(0), Semaphore(0), jobs.read_allowed

    def read_slowly(path: str, *others: Any) -> bytes | None:  # noqa: ANN401 - those of the function
        is_reading.release()
        may_read.acquire(timeout=PATIENCE_SECONDS)
        return reads(path, *others)

    monkeypatch.setattr(jobs, "read_allowed", read_slowly)
    (tmp_path / "a.bmp").write_bytes(SCENE)
    before = asyncio.all_tasks()
    async with open_gateway() as client:
        await index(client, tmp_path, 202, wait="false")
        assert await asyncio.to_thread(is_reading.acquire, timeout=PATIENCE_SECONDS)
    left = asyncio.all_tasks() - before
    may_read.release()

    assert left == set()
