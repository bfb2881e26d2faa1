"""Replays of the calls of OpenProcessor's scripts for ingest and search, against `serve --search` with its own PostgreSQL."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.callers import openprocessor as shapes
from tests.callers.conftest import PATIENCE_SECONDS, serving
from tests.callers.openprocessor import PREFIXES, assert_refused, one, read, several
from tests.callers.pictures import PAGE, PORTRAIT
from tests.postgres import database_home
from tests.processes import wait_for_search
from tests.support import IMAGES, sample_image

CAT, CUP = sample_image("chelsea.jpg"), sample_image("coffee.jpg")
FLAGS: dict[str, str | bool] = {"skip_duplicates": True, "enable_ocr": True, "enable_faces": True, "enable_clip": True}

pytestmark = [pytest.mark.client("OpenProcessor"), pytest.mark.parametrize("prefix", PREFIXES)]


@pytest.fixture(scope="module")
def photos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that may be indexed."""
    folder = tmp_path_factory.mktemp("photos")
    for name in ("chelsea.jpg", "coffee.jpg"):
        shutil.copy(IMAGES / name, folder)
    return folder


@pytest.fixture(scope="module")
def url(repository: Path, sight_models: list[Path], photos: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of a gateway whose search is on, with faces."""
    settings = {"faces": "true", "search": "on", "search_folders": photos, "search_thumbnails": "true", "timeout_seconds": 60}
    folder = tmp_path_factory.mktemp("search")
    with database_home() as home, serving(folder, repository, *sight_models, database_home=home, **settings) as running:
        wait_for_search(running)
        yield running


@pytest.fixture
def client(url: str) -> Iterator[httpx.Client]:
    """Calls a gateway in which nothing is indexed."""
    with httpx.Client(base_url=url, timeout=PATIENCE_SECONDS) as opened:
        yield opened
        for image in ("portrait", "page", "cat", "cup", "again", "direct"):
            opened.delete(f"/query/image/{image}")


def ingest(client: httpx.Client, image: bytes, image_id: str, prefix: str = "", **more: str | bool) -> httpx.Response:
    data = {"image_id": image_id, "image_path": f"/photos/{image_id}.jpg", "metadata": '{"camera": 3}'}
    return client.post(f"{prefix}/ingest", files=one(image), data=data, params=FLAGS | more)


def test_ingest(client: httpx.Client, photos: Path, prefix: str) -> None:
    """Its calls, rewritten: images are indexed one by one, several at a time and from a folder; duplicates are told."""
    response = ingest(client, PORTRAIT, "portrait", prefix)
    first = read(response, shapes.INGESTED)
    indexed = first["indexed"]
    assert (response.status_code, first["status"], first["image_id"], first["num_faces"]) == (201, "success", "portrait", 1)
    assert (indexed["global"], indexed["people"], indexed["faces"]) == (True, 1, 1)
    response = ingest(client, PORTRAIT, "again", prefix)
    again = read(response, shapes.INGESTED)
    existing = again["existing_image_id"], again["existing_image_path"]
    assert (response.status_code, existing) == (200, ("portrait", "/photos/portrait.jpg"))
    page = read(ingest(client, PAGE, "page", prefix), shapes.INGESTED)
    assert (page["ocr"]["num_texts"], page["ocr"]["indexed"], page["near_duplicate"]) == (2, True, None)
    broken = ingest(client, PORTRAIT[:99], "broken", prefix)
    assert (broken.status_code // 100, type(broken.json()["detail"])) == (4, str)

    ids = {"image_ids": '["cat", "again", "broken"]', "image_paths": '["/a.jpg", "/b.jpg", "/c.jpg"]'}
    response = client.post(f"{prefix}/ingest/batch", files=several(CAT, PORTRAIT, CAT[:99]), data=ids, params=FLAGS)
    many = read(response, shapes.MANY_INGESTED)
    assert [many[name] for name in ("total", "processed", "duplicates", "errors_count")] == [3, 1, 1, 1]
    assert many["indexed"]["global"] == 1
    embedded = read(client.post(f"{prefix}/embed/image?index=true&image_id=direct", files=one(CUP)), shapes.EMBEDDED)
    assert (embedded["indexed"], embedded["image_id"]) == (True, "direct")

    query: dict[str, Any] = {"directory": str(photos), "recursive": True, "max_images": 10, "batch_size": 64, **FLAGS}
    assert read(client.post(f"{prefix}/ingest/directory", params=query), shapes.FOLDER)["total_files"] == 2


def test_search(client: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: images are found by an image, an object, a face and words; whose a face is; text by pages."""
    for image, name in ((PORTRAIT, "portrait"), (PAGE, "page"), (CAT, "cat")):
        assert ingest(client, image, name).status_code == 201

    def search(path: str, shape: dict[str, Any], **params: str | float) -> Any:  # noqa: ANN401
        return read(client.post(f"{prefix}/{path}", files=None if "text" in params else one(PORTRAIT), params=params), shape)

    like = {"top_k": 10, "min_score": 0.5}
    by_image = search("search/image", shapes.SEARCHED, **like)
    first = by_image["results"][0]
    assert (by_image["status"], by_image["query_type"]) == ("success", "image")
    assert by_image["total_results"] == len(by_image["results"])
    assert (first["image_id"], first["metadata"]) == ("portrait", {"camera": 3})
    by_object = search("search/object", shapes.OBJECTS_SEARCHED, **like, box_index=0)
    first = by_object["results"][0]
    assert (by_object["query_object"]["category"], first["image_id"]) == ("person", "portrait")
    assert first["class_id"] == by_object["query_object"]["class_id"] == 0
    known = search("faces/identify", shapes.FACES_IDENTIFIED, top_k=5, threshold=0.6)
    matches = known["results"][0]["all_matches"]
    for found in (
        search("search/face", shapes.FACES_SEARCHED, **like, face_index=0)["results"],
        search("faces/search", shapes.FACES_FOUND, **like, face_index=0)["results"],
        matches,
    ):
        assert [(hit["image_id"], hit["image_path"]) for hit in found] == [("portrait", "/photos/portrait.jpg")]
        assert found[0]["score"] == pytest.approx(1, abs=1e-3)
    assert (known["num_faces"], known["results"][0]["identified"], known["results"][0]["best_match"]) == (1, True, matches[0])
    by_words = search("search/ocr", shapes.TEXTS_SEARCHED, **like, text="nereid reads")
    assert [(hit["image_id"], hit["matched_text"]) for hit in by_words["results"]] == [("page", "Nereid reads")]
    words = search("ocr/search", shapes.OCR_SEARCHED, text="Nereid", page=0, size=20, fuzzy=True)
    assert (words["query"], words["total_results"], words["size"], words["results"][0]["num_texts"]) == ("Nereid", 1, 20, 2)
    assert_refused(client.post(f"{prefix}/search/text", params={"text": "a dog"}), 404)


def test_indexed_images_are_counted_shown_and_deleted(client: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: sizes of the indexes, an image and its vector, its deletion, and groups of duplicates."""
    for image, name in ((PORTRAIT, "portrait"), (CAT, "cat")):
        ingest(client, image, name)
    ingest(client, PORTRAIT + b" ", "again")  # the same image in another file
    indexes = read(client.get(f"{prefix}/query/stats"), shapes.STATISTICS)["indexes"]
    counts = {index["name"].removeprefix("visual_search_"): index["doc_count"] for index in indexes}
    assert counts.keys() == {"global", "vehicles", "people", "faces", "ocr"}
    assert counts["global"] == 3
    kept = read(client.get(f"{prefix}/query/image/portrait?include_embedding=true"), shapes.KEPT)
    assert (kept["status"], kept["image_id"], kept["metadata"]["metadata"]) == ("success", "portrait", {"camera": 3})
    (group,) = read(client.get(f"{prefix}/query/duplicates?page=0&size=20&min_size=2"), shapes.GROUPS)["groups"]
    assert (group["primary_image_id"], group["member_count"]) == ("portrait", 2)
    assert client.get(f"{prefix}/query/duplicates/{group['group_id']}").is_success
    assert client.get(f"{prefix}/query/duplicates/stats").is_success
    deleted = read(client.delete(f"{prefix}/query/image/portrait"), {"status": str, "deleted_from": shapes.anything})
    assert (deleted["status"], deleted["total_deleted"] >= 3) == ("success", True)
    assert_refused(client.get(f"{prefix}/query/image/portrait"), 404)
