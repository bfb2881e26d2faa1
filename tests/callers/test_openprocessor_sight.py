"""Replays of the calls of OpenProcessor's scripts for text, faces, vectors of 512 numbers, and analyses."""

from collections.abc import Callable
from io import BytesIO
from typing import Annotated, Any, TypeVar

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from tests.callers.test_openprocessor import PREFIXES, Failure, Share
from tests.support import sample_image

LINES = ["Nereid reads", "two lines 2026"]
PORTRAIT = sample_image("astronaut.jpg")
LATER = ("faces/search", "faces/identify", "ocr/search")
"""What needs an index, of which there is none."""

Box = tuple[Share, Share, Share, Share]
Corners = Annotated[list[float], msgspec.Meta(min_length=8, max_length=8)]
Landmarks = Annotated[list[Share], msgspec.Meta(min_length=10, max_length=10)]
Vector = Annotated[list[float], msgspec.Meta(min_length=2)]
T = TypeVar("T", bound="Answer")


class Size(msgspec.Struct):
    width: int
    height: int


class Answer(msgspec.Struct):
    total_time_ms: float
    request_id: str


class Face(msgspec.Struct):
    box: Box
    landmarks: Landmarks
    score: Share
    quality: Share


class Faces(Answer):
    num_faces: int
    faces: list[Face]
    image: Size


class Recognized(Faces):
    embeddings: list[Vector]


class Compared(msgspec.Struct):
    num_faces: int
    face_used: int


class Verified(Answer):
    match: bool
    similarity: Share
    threshold: Share
    image1: Compared
    image2: Compared


class Embedded(Answer):
    embedding: Vector
    embedding_norm: float
    indexed: bool
    image_id: str | None
    status: str


class OneEmbedded(msgspec.Struct):
    index: int
    filename: str | None
    embedding: Vector | None
    embedding_norm: float | None
    status: str
    error: str | None


class ManyEmbedded(Answer):
    total: int
    successful: int
    failed: int
    results: list[OneEmbedded]
    status: str


class EmbeddedBox(msgspec.Struct):
    box: Box
    embedding: Vector


class EmbeddedBoxes(Answer):
    boxes: list[EmbeddedBox]
    num_boxes: int
    status: str


class Region(msgspec.Struct):
    text: str
    box: Corners
    box_normalized: Box
    det_score: Share
    rec_score: Share


class Read(Answer):
    status: str
    texts: list[str]
    regions: list[Region]
    full_text: str
    num_texts: int
    image: Size
    error: str | None


class Several(Answer):
    status: str
    total_images: int
    processed_images: int
    failed_images: int
    failures: list[Failure]


class OneRead(msgspec.Struct):
    filename: str
    image_index: int
    status: str
    error: str | None
    texts: list[str]
    full_text: str
    num_texts: int
    image: Size


class ManyRead(Several):
    results: list[OneRead]
    total_text_regions: int
    images_with_text: int


class AnalyzedObject(msgspec.Struct):
    box: Box
    confidence: Share
    class_id: int
    class_name: str
    embedding: Vector | None


class AnalyzedFace(Face):
    embedding: Vector | None


class AnalyzedText(msgspec.Struct):
    texts: list[str]
    boxes: list[Corners]
    boxes_normalized: list[Box]
    det_scores: list[Share]
    rec_scores: list[Share]
    full_text: str
    num_texts: int


class Analyzed(Answer):
    status: str
    image: Size
    detections: list[AnalyzedObject]
    num_detections: int
    faces: list[AnalyzedFace]
    num_faces: int
    global_embedding: Vector | None
    embedding_norm: float | None
    ocr: AnalyzedText | None
    timing: dict[str, float]


class OneAnalyzed(msgspec.Struct):
    filename: str
    image_index: int
    status: str
    error: str | None
    image: Size
    num_detections: int
    num_faces: int
    has_text: bool


class ManyAnalyzed(Several):
    results: list[OneAnalyzed]
    total_detections: int
    total_faces: int
    images_with_text: int


def page() -> bytes:
    """Draw lines of text."""
    image = Image.new("RGB", (640, 240), "white")
    for number, line in enumerate(LINES):
        ImageDraw.Draw(image).text((40, 40 + 90 * number), line, "black", ImageFont.load_default(48))
    file = BytesIO()
    image.save(file, "PNG")
    return file.getvalue()


PAGE = page()


@pytest.fixture(autouse=True)
def version(record_property: Callable[[str, object], None]) -> None:
    record_property("version", "c287cd5")


def one(image: bytes, name: str = "image") -> dict[str, tuple[str, bytes, str]]:
    """Return the part of a form with an image."""
    return {name: ("photo.jpg", image, "image/jpeg")}


def several(*images: bytes) -> list[tuple[str, tuple[str, bytes, str]]]:
    """Return the parts of a form with images."""
    return [("images", (f"{number}.jpg", image, "image/jpeg")) for number, image in enumerate(images)]


def read(response: httpx.Response, kind: type[T]) -> T:
    """Decode an answer; all keys of its type must be there."""
    answer = msgspec.json.decode(response.content, type=kind)
    assert answer.request_id == response.headers["x-request-id"]
    return answer


@pytest.mark.client("OpenProcessor")
@pytest.mark.parametrize("prefix", PREFIXES)
def test_text(sight: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: the text of a page, with both scores, and of several images, one of which is broken."""
    found = read(sight.post(f"{prefix}/ocr/predict", files=one(PAGE), params={"min_det_score": 0.5, "min_rec_score": 0.8}), Read)
    assert (found.status, found.texts, found.full_text.split("\n"), found.num_texts) == ("success", LINES, LINES, 2)
    assert (found.image, found.error) == (Size(640, 240), None)
    for region, line in zip(found.regions, LINES, strict=True):
        assert region.text == line
        corners = np.reshape(region.box, (4, 2)) / (640, 240)
        assert [*corners.min(axis=0), *corners.max(axis=0)] == pytest.approx(region.box_normalized, abs=1e-4)
    none = read(sight.post(f"{prefix}/ocr/predict", files=one(PAGE), params={"min_rec_score": 1, "filter_by_score": True}), Read)
    assert (none.status, none.texts, none.full_text, none.num_texts) == ("success", [], "", 0)

    batch = read(sight.post(f"{prefix}/ocr/batch", files=several(PAGE, PORTRAIT, PAGE[:99])), ManyRead)
    assert (batch.total_images, batch.processed_images, batch.failed_images, batch.status) == (3, 2, 1, "partial")
    assert (batch.results[0].filename, batch.results[0].texts, batch.results[1].image_index) == ("0.jpg", LINES, 1)
    assert batch.total_text_regions == sum(result.num_texts for result in batch.results)
    assert batch.images_with_text == sum(result.num_texts > 0 for result in batch.results)
    assert [failure.filename for failure in batch.failures] == ["2.jpg"]


@pytest.mark.client("OpenProcessor")
@pytest.mark.parametrize("prefix", PREFIXES)
def test_faces(sight: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: the face of a portrait, its vector, two portraits compared, and one with a picture without a face."""
    found = read(sight.post(f"{prefix}/faces/detect", files=one(PORTRAIT), params={"confidence": 0.5}), Faces)
    recognized = read(sight.post(f"{prefix}/faces/recognize", files=one(PORTRAIT), params={"confidence": 0.5}), Recognized)
    assert found.num_faces == len(found.faces) == len(recognized.embeddings) == recognized.num_faces == 1
    assert found.faces == recognized.faces
    assert np.linalg.norm(recognized.embeddings[0]) == pytest.approx(1, abs=1e-4)
    x1, y1, x2, y2 = found.faces[0].box
    assert all(x1 < x < x2 for x in found.faces[0].landmarks[::2])
    assert all(y1 < y < y2 for y in found.faces[0].landmarks[1::2])

    pair = {**one(PORTRAIT, "image1"), **one(PORTRAIT, "image2")}
    same = read(sight.post(f"{prefix}/faces/verify", files=pair, params={"threshold": 0.6}), Verified)
    assert (same.match, same.threshold, same.image1, same.image2) == (True, 0.6, Compared(1, 0), Compared(1, 0))
    assert same.similarity == pytest.approx(1, abs=1e-3)
    none = sight.post(f"{prefix}/faces/verify", files={**one(PORTRAIT, "image1"), **one(PAGE, "image2")})
    assert (none.status_code, type(none.json()["detail"])) == (400, str)
    assert read(sight.post(f"{prefix}/faces/recognize", files=one(PAGE)), Recognized).embeddings == []


@pytest.mark.client("OpenProcessor")
@pytest.mark.parametrize("prefix", PREFIXES)
def test_vectors(sight: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: the vector of an image, of several, one of which is broken, and of boxes in an image."""
    params: dict[str, str | bool] = {"use_cache": True, "index": False, "image_id": "portrait"}
    found = read(sight.post(f"{prefix}/embed/image", files=one(PORTRAIT), params=params), Embedded)
    assert (found.indexed, found.image_id, found.status) == (False, "portrait", "success")
    assert np.linalg.norm(found.embedding) == pytest.approx(1, abs=1e-4)

    batch = read(sight.post(f"{prefix}/embed/batch", files=several(PORTRAIT, PORTRAIT[:99])), ManyEmbedded)
    assert (batch.total, batch.successful, batch.failed) == (2, 1, 1)
    (right, wrong) = sorted(batch.results, key=lambda result: result.index)
    assert right.embedding == pytest.approx(found.embedding, abs=1e-5)
    assert (right.filename, right.error, wrong.embedding, wrong.filename) == ("0.jpg", None, None, "1.jpg")
    assert wrong.error

    boxes = [[0.0, 0.0, 1.0, 1.0], [0.25, 0.0, 0.75, 0.5]]
    parts = read(
        sight.post(f"{prefix}/embed/boxes", files=one(PORTRAIT), data={"boxes": msgspec.json.encode(boxes).decode()}),
        EmbeddedBoxes,
    )
    assert ([[*part.box] for part in parts.boxes], parts.num_boxes, parts.status) == (boxes, 2, "success")
    assert np.dot(parts.boxes[0].embedding, found.embedding) > 0.99


@pytest.mark.client("OpenProcessor")
@pytest.mark.parametrize("prefix", PREFIXES)
def test_analyses(sight: httpx.Client, prefix: str) -> None:
    """Its calls, rewritten: objects, faces, text and vectors of one image in one answer, with parts left out, and of several."""
    params = {"include_embedding": True, "include_face_embeddings": True, "enable_ocr": True, "confidence": 0.4}
    found = read(sight.post(f"{prefix}/analyze", files=one(PORTRAIT), params=params | {"face_confidence": 0.5}), Analyzed)
    assert (found.status, found.num_detections, found.num_faces) == ("success", len(found.detections), 1)
    assert "person" in {detection.class_name for detection in found.detections}
    assert found.global_embedding
    assert found.faces[0].embedding
    assert found.ocr
    least = read(
        sight.post(
            f"{prefix}/analyze",
            files=one(PORTRAIT),
            params={"include_embedding": False, "include_face_embeddings": False, "enable_ocr": False},
        ),
        Analyzed,
    )
    assert (least.status, least.global_embedding, least.faces[0].embedding) == ("success", None, None)
    assert not (least.ocr and least.ocr.texts)

    pictures = several(PORTRAIT, PAGE, PAGE[:99])
    batch = read(sight.post(f"{prefix}/analyze/batch", files=pictures, params={"enable_ocr": True}), ManyAnalyzed)
    assert (batch.total_images, batch.processed_images, batch.failed_images) == (3, 2, 1)
    assert batch.results[1].has_text
    assert (batch.total_detections, batch.total_faces) == (
        sum(result.num_detections for result in batch.results),
        sum(result.num_faces for result in batch.results),
    )
    assert batch.images_with_text == sum(result.has_text for result in batch.results)


@pytest.mark.client("OpenProcessor")
def test_routes_that_are_off_are_404_with_a_sentence(sight: httpx.Client, own: httpx.Client) -> None:
    """Its calls, rewritten: searches, an index and vectors of texts get 404 with a sentence; so do faces unless they are on."""
    answers: list[Any] = [
        *(sight.post(f"{prefix}/{path}", files=one(PORTRAIT)) for prefix in PREFIXES for path in LATER),
        sight.post("/embed/image?index=true", files=one(PORTRAIT)),
        sight.post("/embed/text", json={"text": "a dog"}),
        own.post("/faces/detect", files=one(PORTRAIT)),
    ]
    for answer in answers:
        assert (answer.status_code, type(answer.json()["detail"])) == (404, str), answer.url
    assert "NEREID_FACES" in answers[-1].json()["detail"]
