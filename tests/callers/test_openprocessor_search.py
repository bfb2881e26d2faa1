"""Replays of the calls of OpenProcessor's scripts for ingest and search, against `serve --search` with its own PostgreSQL."""

import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from tests.callers.conftest import PATIENCE_SECONDS, serving
from tests.callers.test_openprocessor import PREFIXES, Share
from tests.callers.test_openprocessor_sight import PAGE, PORTRAIT, Answer, Box, Embedded, Face, one, read, several
from tests.postgres import database_home
from tests.processes import wait_for_search
from tests.support import IMAGES, sample_image

CAT, CUP = sample_image("chelsea.jpg"), sample_image("coffee.jpg")
FLAGS: dict[str, str | bool] = {"skip_duplicates": True, "enable_ocr": True, "enable_faces": True, "enable_clip": True}


class Indexed(msgspec.Struct):
    global_: bool = msgspec.field(name="global")
    vehicles: int
    people: int
    faces: int


class OcrIndexed(msgspec.Struct):
    num_texts: int
    full_text: str
    indexed: bool


class NearDuplicate(msgspec.Struct):
    action: str
    group_id: str | None
    similarity: float | None
    matched_image: str | None


class Ingested(Answer):
    status: str
    image_id: str
    num_detections: int
    num_faces: int
    embedding_norm: float | None
    imohash: str
    indexed: Indexed | None
    near_duplicate: NearDuplicate | None
    ocr: OcrIndexed | None
    existing_image_id: str | None
    existing_image_path: str | None
    message: str | None
    error: str | None
    errors: list[Any] | None


class Counts(msgspec.Struct):
    global_: int = msgspec.field(name="global")
    vehicles: int
    people: int
    faces: int
    ocr: int


class ManyIngested(Answer):
    status: str
    total: int
    processed: int
    duplicates: int
    errors_count: int
    indexed: Counts
    near_duplicates: int
    deferred_ops: Any
    duplicate_details: list[Any] | None
    error_details: list[Any] | None
    near_duplicate_details: list[Any] | None


class Hit(msgspec.Struct):
    image_id: str
    image_path: str | None
    score: Share
    metadata: dict[str, Any]


class FaceHit(Hit):
    face_id: str
    box: Box
    confidence: Share
    person_id: str | None
    person_name: str | None


class ObjectHit(Hit):
    box: Box | None
    class_id: int | None
    category: str


class TextHit(Hit):
    matched_text: str | None
    text_box: Box | None
    full_text: str | None


class Searched(Answer):
    status: str
    query_type: str
    results: Sequence[Hit]
    total_results: int
    search_time_ms: float


class QueryObject(msgspec.Struct):
    box: Box
    class_id: int
    category: str


class ObjectSearched(Searched):
    query_object: QueryObject
    results: Sequence[ObjectHit]


class FaceSearched(Searched):
    query_face: Face
    results: Sequence[FaceHit]


class TextSearched(Searched):
    query_text: str
    results: Sequence[TextHit]


class FacesSearched(Answer):
    query_face: Face
    results: Sequence[FaceHit]
    total_results: int
    search_time_ms: float


class Identified(msgspec.Struct):
    query_face: Face
    identified: bool
    best_match: FaceHit | None
    all_matches: list[FaceHit]


class FacesIdentified(Answer):
    num_faces: int
    results: Sequence[Identified]


class OcrHit(msgspec.Struct):
    image_id: str
    image_path: str | None
    score: Share
    full_text: str
    num_texts: int
    highlight: Any


class OcrSearched(Answer):
    status: str
    query: str
    total_results: int
    page: int
    size: int
    results: Sequence[OcrHit]


class Index(msgspec.Struct):
    name: str
    doc_count: int
    size_bytes: int
    size_human: str
    exists: bool


class Statistics(msgspec.Struct):
    status: str
    indexes: list[Index]


class Kept(msgspec.Struct):
    status: str
    image_id: str
    image_path: str | None
    metadata: dict[str, Any]
    indexed_in: Any
    num_detections: int


class Deleted(msgspec.Struct):
    status: str
    deleted_from: Any
    total_deleted: int


class Group(msgspec.Struct):
    group_id: str
    primary_image_id: str
    primary_image_path: str | None
    member_count: int


class Groups(msgspec.Struct):
    groups: list[Group]


@pytest.fixture(autouse=True)
def version(record_property: Callable[[str, object], None]) -> None:
    record_property("version", "c287cd5")


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
    with (
        database_home() as home,
        serving(tmp_path_factory.mktemp("search"), repository, *sight_models, database_home=home, **settings) as running,
    ):
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


def decode(response: httpx.Response, kind: type[Any]) -> Any:  # noqa: ANN401 - of this type
    """Decode an answer that tells no time; all keys of its type must be there."""
    assert response.is_success, response.text
    return msgspec.json.decode(response.content, type=kind)


@pytest.mark.client("OpenProcessor")
@pytest.mark.parametrize("prefix", PREFIXES)
def test_ingest(client: httpx.Client, photos: Path, prefix: str) -> None:
    """Its calls, rewritten: images are indexed one by one, several at a time and from a folder; duplicates are told."""
    response = ingest(client, PORTRAIT, "portrait", prefix)
    first = read(response, Ingested)
    again = ingest(client, PORTRAIT, "again", prefix)
    assert (response.status_code, first.status, first.image_id, first.num_faces) == (201, "success", "portrait", 1)
    assert first.indexed
    assert (first.indexed.global_, first.indexed.people, first.indexed.faces) == (True, 1, 1)
    assert (again.status_code, read(again, Ingested).existing_image_id) == (200, "portrait")
    assert again.json()["existing_image_path"] == "/photos/portrait.jpg"
    page = read(ingest(client, PAGE, "page", prefix), Ingested)
    assert page.ocr
    assert (page.ocr.num_texts, page.ocr.indexed, page.near_duplicate) == (2, True, None)
    broken = ingest(client, PORTRAIT[:99], "broken", prefix)
    assert (broken.status_code // 100, type(broken.json()["detail"])) == (4, str)

    ids = {"image_ids": '["cat", "again", "broken"]', "image_paths": '["/a.jpg", "/b.jpg", "/c.jpg"]'}
    many = read(client.post(f"{prefix}/ingest/batch", files=several(CAT, PORTRAIT, CAT[:99]), data=ids, params=FLAGS), ManyIngested)
    assert (many.total, many.processed, many.duplicates, many.errors_count) == (3, 1, 1, 1)
    assert many.indexed.global_ == 1
    embedded = read(client.post(f"{prefix}/embed/image?index=true&image_id=direct", files=one(CUP)), Embedded)
    assert (embedded.indexed, embedded.image_id) == (True, "direct")

    query: dict[str, Any] = {"directory": str(photos), "recursive": True, "max_images": 10, "batch_size": 64, **FLAGS}
    folder = decode(client.post(f"{prefix}/ingest/directory", params=query), dict[str, Any])
    assert {"status", "directory", "total_files", "skipped_extensions", "processed", "duplicates"} <= folder.keys()
    assert folder["total_files"] == 2


@pytest.mark.client("OpenProcessor")
@pytest.mark.parametrize("prefix", PREFIXES)
def test_search(client: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: images are found by an image, an object, a face and words; whose a face is; text by pages."""
    for image, name in ((PORTRAIT, "portrait"), (PAGE, "page"), (CAT, "cat")):
        assert ingest(client, image, name).status_code == 201
    like = {"top_k": 10, "min_score": 0.5}
    by_image = read(client.post(f"{prefix}/search/image", files=one(PORTRAIT), params=like), Searched)
    by_object = read(client.post(f"{prefix}/search/object?box_index=0", files=one(PORTRAIT), params=like), ObjectSearched)
    by_face = read(client.post(f"{prefix}/search/face?face_index=0", files=one(PORTRAIT), params=like), FaceSearched)
    by_words = read(client.post(f"{prefix}/search/ocr", params=like | {"text": "nereid reads"}), TextSearched)
    faces = read(client.post(f"{prefix}/faces/search?face_index=0", files=one(PORTRAIT), params=like), FacesSearched)
    known = read(
        client.post(f"{prefix}/faces/identify", files=one(PORTRAIT), params={"top_k": 5, "threshold": 0.6}), FacesIdentified
    )
    query: dict[str, str | int] = {"text": "Nereid", "page": 0, "size": 20, "fuzzy": True}
    words = read(client.post(f"{prefix}/ocr/search", params=query), OcrSearched)

    assert (by_image.status, by_image.query_type, by_image.total_results) == ("success", "image", len(by_image.results))
    assert (by_image.results[0].image_id, by_image.results[0].metadata) == ("portrait", {"camera": 3})
    assert (by_object.query_object.category, by_object.results[0].image_id) == ("person", "portrait")
    assert by_object.results[0].class_id == by_object.query_object.class_id == 0
    for found in (by_face.results, faces.results, known.results[0].all_matches):
        assert [(hit.image_id, hit.image_path) for hit in found] == [("portrait", "/photos/portrait.jpg")]
        assert found[0].score == pytest.approx(1, abs=1e-3)
    assert (known.num_faces, known.results[0].identified, known.results[0].best_match) == (1, True, known.results[0].all_matches[0])
    assert [(hit.image_id, hit.matched_text) for hit in by_words.results] == [("page", "Nereid reads")]
    assert (words.query, words.total_results, words.size, words.results[0].num_texts) == ("Nereid", 1, 20, 2)
    text = client.post(f"{prefix}/search/text", params={"text": "a dog"})
    assert (text.status_code, type(text.json()["detail"])) == (404, str)


@pytest.mark.client("OpenProcessor")
@pytest.mark.parametrize("prefix", PREFIXES)
def test_indexed_images_are_counted_shown_and_deleted(client: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: sizes of the indexes, an image and its vector, its deletion, and groups of duplicates."""
    for image, name in ((PORTRAIT, "portrait"), (CAT, "cat")):
        ingest(client, image, name)
    ingest(client, PORTRAIT + b" ", "again")  # the same image in another file
    counts = decode(client.get(f"{prefix}/query/stats"), Statistics)
    names = [f"visual_search_{name}" for name in ("global", "vehicles", "people", "faces", "ocr")]
    assert sorted(index.name for index in counts.indexes) == sorted(names)
    assert {index.name: index.doc_count for index in counts.indexes}["visual_search_global"] == 3
    kept = decode(client.get(f"{prefix}/query/image/portrait?include_embedding=true"), Kept)
    assert (kept.status, kept.image_id, kept.metadata["metadata"]) == ("success", "portrait", {"camera": 3})
    (group,) = decode(client.get(f"{prefix}/query/duplicates?page=0&size=20&min_size=2"), Groups).groups
    assert (group.primary_image_id, group.member_count) == ("portrait", 2)
    assert client.get(f"{prefix}/query/duplicates/{group.group_id}").is_success
    assert client.get(f"{prefix}/query/duplicates/stats").is_success
    deleted = decode(client.delete(f"{prefix}/query/image/portrait"), Deleted)
    assert (deleted.status, deleted.total_deleted >= 3) == ("success", True)
    gone = client.get(f"{prefix}/query/image/portrait")
    assert (gone.status_code, type(gone.json()["detail"])) == (404, str)
