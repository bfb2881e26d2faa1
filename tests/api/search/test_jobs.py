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
from app.settings.schema import Settings
from tests.fakes.models import scene
from tests.postgres import Server
from tests.processes import PATIENCE_SECONDS
from tests.search.made import gateway_of
from tests.support import SCENE, json

OTHER = scene("BMP", background="yellow", shift=10)
QUICK = {"enable_ocr": "false", "enable_faces": "false", "enable_detection": "false"}


def fill(folder: Path) -> Path:
    """Make a folder with two images, one of them twice, what is no image, and what leads out of it."""
    inner = folder / "photos" / "inner"
    inner.mkdir(parents=True)
    for path, content in {"a.bmp": SCENE, "b.PNG": b"junk", "inner/c.bmp": OTHER, "inner/d.bmp": SCENE, "e.txt": b"text"}.items():
        (folder / "photos" / path).write_bytes(content)
    (outside := folder.parent / f"{folder.name}-outside").mkdir()
    (outside / "secret.bmp").write_bytes(scene("BMP", "green"))
    (folder / "photos" / "linked").symlink_to(outside)
    (folder / "photos" / "link.bmp").symlink_to(outside / "secret.bmp")
    os.mkfifo(folder / "photos" / "pipe.bmp")
    return folder / "photos"


async def test_the_images_of_a_folder_are_indexed(searching: httpx.AsyncClient, tmp_path: Path) -> None:
    """Those that fail are counted; nothing outside of the folder is read, and nothing waits for a pipe."""
    photos = fill(tmp_path)
    answer = json(await searching.post("/v1/ingest/directory", params={"directory": str(photos), "batch_size": "8"}), 201)
    job = json(await searching.get(f"/v1/ingest/jobs/{answer['job_id']}"))
    again = json(await searching.post("/ingest/directory", params={"directory": str(photos), "max_images": "2", **QUICK}), 201)
    listed, older = [json(await searching.get(f"/ingest/jobs?size=1&page={page}")) for page in (0, 1)]

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


async def test_a_job_need_not_be_waited_for(searching: httpx.AsyncClient, tmp_path: Path) -> None:
    (tmp_path / "a.bmp").write_bytes(SCENE)
    given = {"directory": str(tmp_path), **QUICK}
    begun = json(await searching.post("/ingest/directory", params={**given, "wait": "false"}), 202)
    after = json(await searching.post("/ingest/directory", json={**given, "timeout_ms": 20_000}), 201)

    assert (begun["state"], begun["ended_at"], after["duplicates"]) == ("waiting", None, 1)  # one after the other


async def test_a_job_that_would_make_an_index_that_is_damaged_fails_and_says_why(
    searching: httpx.AsyncClient, search_settings: Settings, postgres: Server, tmp_path: Path
) -> None:
    (tmp_path / "a.bmp").write_bytes(SCENE)
    await postgres.pretend(search_settings.database_url, "0.8.2")
    ended = json(await searching.post("/ingest/directory", params={"directory": str(tmp_path), **QUICK}))
    assert (ended["state"], "install pgvector 0.8.4 or later" in ended["error"]) == ("failed", True)


async def test_only_some_folders_may_be_indexed(searching: httpx.AsyncClient, search_settings: Settings, tmp_path: Path) -> None:
    photos = fill(tmp_path)
    refused = [
        "",
        str(tmp_path.parent),
        f"{tmp_path}/..",
        str(photos / "linked"),
        str(photos / "a.bmp"),
        "photos",
        "a\0",
        "x" * 3000,
    ]
    for directory in refused:
        problem = json(await searching.post("/ingest/directory", params={"directory": directory}), 400)
        assert problem["code"] == "invalid_parameter"
    assert json(await searching.post("/ingest/directory?directory=/&unheard_of=1"), 400)["code"] == "invalid_parameter"
    assert json(await searching.post("/ingest/directory", content=b"[1]"), 400)["code"] == "malformed_request"
    for job_id in ("1", "%00", "8e7b9f3c-0d5c-4f57-9c8c-6f4f0c3b8d11"):
        assert json(await searching.get(f"/ingest/jobs/{job_id}"), 404)["code"] == "unknown_record"
    async with gateway_of(msgspec.structs.replace(search_settings, search_folders="")) as client:
        problem = json(await client.post("/ingest/directory", params={"directory": str(photos)}), 404)
    assert (problem["code"], "NEREID_SEARCH_FOLDERS" in problem["detail"]) == ("not_offered", True)


async def test_another_worker_goes_on_where_one_has_died(search_settings: Settings, tmp_path: Path) -> None:
    """A job of 130 images whose worker has saved the first two chunks, and then nothing more."""
    for number in range(130):
        (tmp_path / f"{number:03}.bmp").write_bytes(b"junk" if number < 128 else scene("BMP", shift=number - 120))
    engine = PostgresEngine(search_settings.database_url)
    flags = IngestOptions()
    options = msgspec.to_builtins(DirectoryOptions(str(tmp_path), recursive=True, max_images=None, ingest=flags))
    await engine.add_job("", "directory", options)
    dead = await engine.claim_job(60)
    assert dead is not None
    dead.position, dead.counts = str(tmp_path / "127.bmp"), {"processed": 128, "total_files": 130}
    assert await engine.save_job(dead)
    dead.state = "waiting"  # as after the time in which it should have been saved
    assert await engine.save_job(dead)
    async with gateway_of(search_settings) as client:
        ended: dict[str, Any] = {}
        while ended.get("state") != "done":
            ended = json(await client.get(f"/ingest/jobs/{dead.job_id}"))
    assert (ended["total"], ended["processed"], ended["errors_count"]) == (130, 130, 0)
    assert not await engine.save_job(dead)
    await engine.close()


async def test_an_index_is_made_anew_with_another_model(search_settings: Settings, tmp_path: Path) -> None:
    """Beside the old vectors; which stay in use while images cannot be read again, and until all have new ones."""
    for name, content in {"a.bmp": SCENE, "b.bmp": OTHER}.items():
        (tmp_path / name).write_bytes(content)
    search_settings = msgspec.structs.replace(search_settings, faces=False)  # whose model is the other one
    other = msgspec.structs.replace(search_settings, task_models="embedding=faces_description")
    engine = PostgresEngine(search_settings.database_url)
    async with gateway_of(search_settings) as client:
        nothing = json(await client.post("/search/reindex"), 400)
        json(await client.post("/ingest/directory", params={"directory": str(tmp_path)}), 201)
        json(await client.post("/ingest?image_id=lost", content=scene("PNG", "green")), 201)
        same = json(await client.post("/search/reindex"), 400)
    async with gateway_of(other) as client:
        failed = json(await client.post("/v1/search/reindex", json={"family": "image"}))
        used = await engine.models("image")
        json(await client.post("/ingest?image_id=new", content=scene("PNG", "red")), 201)
        both = (await engine.images_without("image", "", 10), await engine.models("image"))
        json(await client.post("/ingest?image_id=lost&skip_duplicates=false", content=scene("BMP", "green")), 201)
        done = json(await client.post("/search/reindex"), 201)
        switched = await engine.models("image")
        json(await client.post("/ingest?image_id=last", content=scene("PNG", "yellow")), 201)
        again = json(await client.post("/search/reindex?family=image"), 400)
    counts = {each.name: each.records for each in await engine.statistics("")}
    pages = await engine.jobs("", Page(10))
    await engine.close()

    assert "no vectors yet" in nothing["detail"]
    assert "embedding:1" in same["detail"]
    assert (failed["state"], failed["processed"], failed["unreadable"]) == ("failed", 2, 1)
    assert "1 images cannot be read again" in failed["error"]
    assert (used.active, used.next) == ("embedding:1", "faces_description:1")
    assert both == ([("", "lost", None)], used)
    assert (done["state"], done["processed"], done["unreadable"]) == ("done", 0, 0)
    assert (switched.active, switched.next, again["code"]) == ("faces_description:1", None, "invalid_parameter")
    assert (counts["global"], counts["vehicles"], pages.total) == (5, 5, 3)


async def test_images_of_the_same_name_in_two_folders_are_two(search_settings: Settings, tmp_path: Path) -> None:
    for name, content in {"one": SCENE, "two": OTHER}.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.bmp").write_bytes(content)
    both = msgspec.structs.replace(search_settings, search_folders=f"{tmp_path}/one,{tmp_path}/two")
    async with gateway_of(both) as client:
        for name in ("one", "two"):
            json(await client.post("/ingest/directory", params={"directory": str(tmp_path / name), **QUICK}), 201)
        stats = json(await client.get("/query/stats"))
    assert stats["indexes"][0]["doc_count"] == 2


async def test_a_worker_keeps_a_job_while_it_lists_a_large_folder(
    search_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    async with gateway_of(search_settings) as client:
        assert json(await client.post("/ingest/directory", params={"directory": str(tmp_path)}), 201)["state"] == "done"


async def test_jobs_of_two_tenants_take_turns(search_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a large folder would keep all others waiting."""
    read, reads = list[str](), jobs.read_allowed

    def note(path: str, *others: Any) -> bytes | None:  # noqa: ANN401 - those of the function
        read.append(Path(path).parent.name)
        return reads(path, *others)

    monkeypatch.setattr(jobs, "CHUNK", 1)
    monkeypatch.setattr(jobs, "_TURN_SECONDS", 0.0)
    monkeypatch.setattr(jobs, "monotonic", lambda: 0.0)
    monkeypatch.setattr(jobs, "read_allowed", note)
    engine = PostgresEngine(search_settings.database_url)
    added = []
    for tenant in ("north", "south"):
        (tmp_path / tenant).mkdir()
        for name in "abc":
            (tmp_path / tenant / f"{name}.bmp").write_bytes(b"junk")
        options = DirectoryOptions(str(tmp_path / tenant), recursive=True, max_images=None, ingest=IngestOptions())
        added.append(await engine.add_job(tenant, "directory", msgspec.to_builtins(options)))
    async with gateway_of(search_settings):
        for job in added:
            while (await engine.job(job.tenant, job.job_id)).state != "done":  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(0.05)
    await engine.close()

    assert read == ["north", "south"] * 3


async def test_shutdown_cancels_the_work_on_images_of_a_job(
    search_settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
    async with gateway_of(search_settings) as client:
        json(await client.post("/ingest/directory", params={"directory": str(tmp_path), "wait": "false"}), 202)
        assert await asyncio.to_thread(is_reading.acquire, timeout=PATIENCE_SECONDS)
    left = asyncio.all_tasks() - before
    may_read.release()

    assert left == set()


async def test_another_change_of_the_model_takes_the_place_of_one(search_settings: Settings) -> None:
    """One that is repeated after its worker has died when it had switched has succeeded."""
    search_settings = msgspec.structs.replace(search_settings, faces=False)
    other = msgspec.structs.replace(search_settings, task_models="embedding=faces_description")
    engine = PostgresEngine(search_settings.database_url)
    async with gateway_of(search_settings) as client:
        json(await client.post("/ingest", content=SCENE, params=QUICK), 201)
    await engine.begin_model("image", "unwanted:1", 8)
    async with gateway_of(other) as client:
        failed = json(await client.post("/search/reindex"))
        used = await engine.models("image")
        await engine.end_model("image", switch=True)
        options = msgspec.to_builtins(jobs.ReindexOptions("image", "faces_description:1", allow_missing=False))
        job = await engine.add_job("", "reindex", options)
        ended: dict[str, Any] = {}
        while ended.get("state") not in {"done", "failed"}:
            ended = json(await client.get(f"/ingest/jobs/{job.job_id}"))
    await engine.close()

    assert (failed["unreadable"], used.next) == (1, "faces_description:1")
    assert (ended["state"], ended["error"]) == ("done", None)
