"""Text, faces, vectors, analyses, cascades and what search keeps reach the users of the client, with both classes."""

import asyncio
from collections.abc import AsyncIterator

import httpx
import msgspec
import pytest

from app.settings.schema import Settings
from nereid_client import AsyncClient, Client, Problem, Vector
from tests.clients.conftest import ThreadTransport, detected
from tests.fakes import models
from tests.search import made
from tests.support import SCENE


@pytest.fixture
async def transport(served: Settings, database: str) -> AsyncIterator[httpx.ASGITransport]:
    """Of an application in which faces and search are on."""
    options = {"model": "six_columns", "faces": True, "database_url": database}
    async with made.served(msgspec.structs.replace(served, **options)) as app:
        yield httpx.ASGITransport(app, raise_app_exceptions=False)  # type: ignore[arg-type]


async def test_each_method_returns_what_the_gateway_says(asynchronous: AsyncClient) -> None:
    client = asynchronous
    read = await client.ocr(SCENE, min_rec_score=0.6)
    faces, described = await client.detect_faces(SCENE), await client.recognize_faces(SCENE)
    verified = await client.verify_faces(SCENE, SCENE, threshold=0.7)
    one, (other, wrong) = await client.embed(SCENE), await client.embed_batch([SCENE, b"nothing"])
    parts = await client.embed_boxes(SCENE, [(0, 0, 1, 1), (0.1, 0.3, 0.4, 0.9)])
    everything = await client.analyze(SCENE, include_embedding=True, include_face_embeddings=True)
    found = await client.predict("six_columns", SCENE, boxes="pixel")

    assert (sorted(read.texts), len(read.regions[0].box), read.truncated) == (["b", "r"], 8, False)
    assert read.timings.keys() >= {"lines", "direction", "text"}
    assert (faces.faces, faces.embeddings) == (described.faces, [])
    assert len(described.embeddings) == len(faces.faces) == verified.image1.num_faces
    assert (verified.match, verified.similarity, verified.threshold) == (True, 1.0, 0.7)
    assert isinstance(other, Vector)
    assert (other.embedding, other.model) == (one.embedding, one.model)
    assert isinstance(wrong, Problem)
    assert (wrong.status, wrong.code) == (415, "unsupported_format")
    assert [part.box for part in parts.boxes] == [(0, 0, 1, 1), (0.1, 0.3, 0.4, 0.9)]
    assert everything.global_embedding == one.embedding
    assert everything.ocr
    assert (everything.ocr.texts, len(everything.faces), everything.errors) == (["r"], len(faces.faces), {})
    assert all(face.embedding for face in everything.faces)
    assert all(detection.embedding for detection in everything.detections)
    assert (found.steps, found.image_steps) == ([{}] * len(found.detections), {})


async def test_images_are_indexed_found_and_deleted(asynchronous: AsyncClient) -> None:
    client = asynchronous
    added = await client.ingest(SCENE, metadata={"camera": 3}, image_id="one", image_path="/one.bmp")
    again = await client.ingest(SCENE, image_id="two")
    await client.ingest(models.scene("BMP", shift=16), image_id="other", detect_near_duplicates=False)
    alike = await client.search_image(SCENE, top_k=5, min_score=0.1)
    faces = await client.search_faces(SCENE, min_score=0.9)
    words = await client.search_text("r", top_k=1)
    deleted = await client.delete_image("one")
    with pytest.raises(Problem, match="unknown_record"):
        await client.delete_image("one")

    assert (added.status, added.image_id, added.num_detections, added.timings["total"] > 0) == ("success", "one", 2, True)
    assert (again.status, again.existing_image_id, again.existing_image_path) == ("duplicate", "one", "/one.bmp")
    assert (alike.results[0].image_id, alike.results[0].metadata) == ("one", {"camera": 3})
    assert alike.results[0].score == pytest.approx(1, abs=1e-3)
    assert faces.results[0].face_id
    assert faces.results[0].box
    assert words.results[0].matched_text == "r"
    assert deleted.total_deleted > 1


async def test_client_and_async_client_return_the_same_answers(asynchronous: AsyncClient, transport: httpx.ASGITransport) -> None:
    await asynchronous.ingest(SCENE, image_id="one")
    calls: dict[str, tuple[tuple[object, ...], str]] = {
        **{name: ((SCENE,), field) for name, field in (("ocr", "texts"), ("embed", "embedding"), ("analyze", "detections"))},
        **{name: ((SCENE,), field) for name, field in (("detect_faces", "faces"), ("recognize_faces", "embeddings"))},
        **dict.fromkeys(("search_image", "search_faces"), ((SCENE,), "results")),
        "verify_faces": ((SCENE, SCENE), "match"),
        "embed_boxes": ((SCENE, [(0, 0, 1, 1)]), "boxes"),
        "predict": (("six_columns", SCENE), "detections"),
        "ingest": ((SCENE,), "existing_image_id"),
        "search_text": (("r",), "results"),
    }
    found = [getattr(await getattr(asynchronous, name)(*given), field) for name, (given, field) in calls.items()]

    def ask() -> list[object]:
        with Client(transport=ThreadTransport(transport, loop)) as client:
            answers = [getattr(getattr(client, name)(*given), field) for name, (given, field) in calls.items()]
            return [*answers, client.embed_batch([SCENE]), client.delete_image("one").total_deleted > 1]

    loop = asyncio.get_running_loop()
    batch = await asynchronous.embed_batch([SCENE])
    assert await asyncio.to_thread(ask) == [*found, batch, True]


async def test_steps_of_a_cascade_are_apart_from_the_objects() -> None:
    text = {"text": {"text": "AB 12", "confidence": 0.9}}
    plain = detected(("plate", 0, 0.9, (0.1, 0.1, 0.5, 0.5))).json()
    plain["detections"][0] |= text
    errors = {"colour": {"code": "invalid_model_output", "detail": "no"}}
    asked: list[str] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request.url.path)
        return httpx.Response(200, json={**plain, "truncated": True, "mood": {"class_name": "light"}, "errors": errors})

    async with AsyncClient(transport=httpx.MockTransport(handle)) as client:
        found = await client.predict("plates", b"picture")

    assert (asked, found.steps) == (["/predict/plates"], [text])
    assert (found.image_steps, found.truncated) == ({"mood": {"class_name": "light"}}, True)
    assert found.errors["colour"].code == "invalid_model_output"
