"""Text, faces, vectors, analyses and cascades reach the users of the client, with both classes."""

import asyncio
from collections.abc import AsyncIterator
from io import BytesIO

import httpx
import msgspec
import pytest
from PIL import Image

from app.embedded.server import EmbeddedTriton
from app.main import create_app
from app.settings.schema import Settings
from nereid_client import AsyncClient, Client, ImageSize, Prepare, Problem, Vector
from tests.clients.conftest import ThreadTransport
from tests.support import SCENE, lifespan_of


@pytest.fixture(scope="module")
async def transport(settings: Settings, triton: EmbeddedTriton) -> AsyncIterator[httpx.ASGITransport]:
    """Of an application in which faces are on."""
    assert triton.poll() is None
    app = create_app(msgspec.structs.replace(settings, model="six_columns", faces=True))
    async with lifespan_of(app):
        yield httpx.ASGITransport(app, raise_app_exceptions=False)  # type: ignore[arg-type]


async def test_each_method_returns_what_the_gateway_says(transport: httpx.ASGITransport) -> None:
    async with AsyncClient(transport=transport) as client:
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


async def test_client_and_async_client_return_the_same_answers(transport: httpx.ASGITransport) -> None:
    calls: list[tuple[str, tuple[object, ...], str]] = [
        ("ocr", (SCENE,), "texts"),
        ("detect_faces", (SCENE,), "faces"),
        ("recognize_faces", (SCENE,), "embeddings"),
        ("verify_faces", (SCENE, SCENE), "match"),
        ("embed", (SCENE,), "embedding"),
        ("embed_boxes", (SCENE, [(0, 0, 1, 1)]), "boxes"),
        ("analyze", (SCENE,), "detections"),
        ("predict", ("six_columns", SCENE), "detections"),
    ]

    def ask() -> list[object]:
        with Client(transport=ThreadTransport(transport, loop)) as client:
            found = [getattr(getattr(client, name)(*given), field) for name, given, field in calls]
            return [*found, client.embed_batch([SCENE])]

    loop = asyncio.get_running_loop()
    async with AsyncClient(transport=transport) as client:
        found = [getattr(await getattr(client, name)(*given), field) for name, given, field in calls]
        assert await asyncio.to_thread(ask) == [*found, await client.embed_batch([SCENE])]


async def test_corners_of_a_prepared_picture_are_those_of_the_original(transport: httpx.ASGITransport) -> None:
    file = BytesIO()
    Image.open(BytesIO(SCENE)).resize((800, 400)).save(file, "PNG")
    async with AsyncClient(transport=transport) as client:
        small = await client.ocr(SCENE)
        large = await client.ocr(file.getvalue(), prepare=Prepare(200, 95))

    assert (large.image, large.texts) == (ImageSize(800, 400), small.texts)
    assert large.regions[0].box == pytest.approx([4 * at for at in small.regions[0].box], abs=12)


async def test_steps_of_a_cascade_are_apart_from_the_objects() -> None:
    answer = {
        "detections": [
            {"x1": 0.1, "y1": 0.1, "x2": 0.5, "y2": 0.5, "confidence": 0.9, "class": 0, "class_id": 0, "class_name": "plate"}
            | {"text": {"text": "AB 12", "confidence": 0.9}}
        ],
        "num_detections": 1,
        "status": "success",
        "image": {"width": 4, "height": 4},
        "model": {"name": "plates", "version": "1", "backend": "triton", "device": "cpu"},
        "total_time_ms": 1.0,
        "request_id": "0",
        "truncated": True,
        "mood": {"class_name": "light"},
        "errors": {"colour": {"code": "invalid_model_output", "detail": "no"}},
    }
    asked: list[httpx.Request] = []

    def handle(request: httpx.Request) -> httpx.Response:
        asked.append(request)
        return httpx.Response(200, json=answer)

    async with AsyncClient(transport=httpx.MockTransport(handle)) as client:
        found = await client.predict("plates", b"picture")

    assert asked[0].url.path == "/predict/plates"
    assert found.steps == [{"text": {"text": "AB 12", "confidence": 0.9}}]
    assert (found.image_steps, found.truncated) == ({"mood": {"class_name": "light"}}, True)
    assert found.errors["colour"].code == "invalid_model_output"
