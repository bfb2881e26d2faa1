"""What is seen in an image: vectors, faces, text, and all of it together; by models and cascades that an operator may change."""

from base64 import b64encode
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import pytest
from PIL import Image

from app.cascade import catalog
from app.main import create_app
from app.settings.schema import Settings
from tests.api.search.conftest import picture
from tests.fakes.models import FACE, RECTANGLES, SIZE, scene
from tests.support import NEEDS_BYTES, SCENE, json, started

OpenGateway = Callable[..., AbstractAsyncContextManager[httpx.AsyncClient]]


@pytest.fixture
def open_gateway(served: Settings, tmp_path: Path) -> OpenGateway:
    @asynccontextmanager
    async def open_one(cascades: str = "", **others: object) -> AsyncIterator[httpx.AsyncClient]:
        if cascades:
            (tmp_path / "cascades.toml").write_text(cascades)
            others["model_repository"] = str(tmp_path)
        async with started(create_app(msgspec.structs.replace(served, faces=True, model="six_columns", **others))) as client:
            yield client

    return open_one


async def test_vector_of_an_image_has_length_1_and_is_that_of_predict(client: httpx.AsyncClient) -> None:
    answer = json(await client.post("/v1/embed/image?image_id=first&use_cache=false&index=false", files={"image": SCENE}))
    predicted = json(await client.post("/predict/embedding", content=SCENE))
    vector = np.array(answer["embedding"])
    assert np.linalg.norm(vector) == pytest.approx(1, abs=1e-6)
    # The upper left quarter of the stretched scene is white but for the red rectangle.
    red, green, _ = vector.reshape(3, 2, 2)[:, 0, 0]
    assert red > green
    assert predicted["embedding"] == answer["embedding"]
    given = {name: answer[name] for name in ("image_id", "status", "indexed", "image")}
    assert given == {"image_id": "first", "status": "success", "indexed": False, "image": {"width": 200, "height": 100}}
    assert (answer["model"]["name"], answer["embedding_norm"] > 0) == ("embedding", True)


async def test_vector_of_a_box_is_that_of_what_it_cuts_out(client: httpx.AsyncClient) -> None:
    boxes = [[0.1, 0.3, 0.4, 0.9], [0, 0, 1, 1], [0.999999, 0.999999, 1, 1]]
    whole = json(await client.post("/embed/image", content=SCENE))["embedding"]
    forms: list[dict[str, Any]] = [
        {"json": {"image": b64encode(SCENE).decode(), "boxes": boxes}},
        {"files": {"image": SCENE}, "data": {"boxes": str(boxes)}},
    ]
    for form in forms:
        answer = json(await client.post("/embed/boxes", **form))
        assert (answer["num_boxes"], answer["status"], answer["image"]) == (3, "success", {"width": 200, "height": 100})
        assert [one["box"] for one in answer["boxes"]] == boxes
        red, all_of_it, corner = (np.array(one["embedding"]).reshape(3, 4) for one in answer["boxes"])
        assert red == pytest.approx(np.array([[0.5] * 4, [0] * 4, [0] * 4]), abs=1e-6)
        assert all_of_it.ravel().tolist() == whole
        assert np.ptp(corner) == pytest.approx(0, abs=1e-6)  # of white


async def test_text_needs_a_model(client: httpx.AsyncClient) -> None:
    problem = json(await client.post("/embed/text", json={"text": "a red car"}), 404)

    assert problem["code"] == "unknown_model"
    assert problem["detail"].startswith("texts cannot be described: there is no model embedding_text")
    for content in (b"[]", b'{"text": 3}', b'{"text": ""}', b'{"text": "%s"}' % (b"x" * 4097)):
        assert json(await client.post("/embed/text", content=content), 400)["code"] == "malformed_request"


@NEEDS_BYTES
async def test_vector_of_a_text_is_that_of_a_model_whose_input_is_text(client: httpx.AsyncClient) -> None:
    answer = json(await client.post("/v1/embed/text?model=letters", json={"text": "abß"}))

    counts = np.array([1, 1, 0, 2])  # of a, b, c and other bytes
    assert answer["embedding"] == pytest.approx(counts / np.linalg.norm(counts), abs=1e-6)
    assert (answer["embedding_norm"], answer["text"], answer["status"]) == (pytest.approx(6**0.5), "abß", "success")
    assert json(await client.post("/embed/text?model=embedding", json={"text": "a"}), 502)["code"] == "unsupported_model"
    assert json(await client.post("/embed/text?model=six_columns", json={"text": "a"}), 400)["code"] == "wrong_task"


async def test_images_of_a_batch_are_described_by_the_same_model_or_fail_alone(open_gateway: OpenGateway, tmp_path: Path) -> None:
    """Vectors of different models cannot be compared; otherwise the canary would get every second image."""
    (file := tmp_path / "routes.toml").write_text(
        '[vectors]\nto = "embedding"\ncanary = { to = "faces_description", share = 0.5 }\n'
    )
    files = [("images", image) for image in (SCENE, SCENE, b"junk", SCENE, SCENE)]
    async with open_gateway(routes_file=str(file)) as client:
        answer = json(await client.post("/embed/batch?model=vectors", files=files))
        read = json(await client.post("/v1/ocr/batch?max_workers=4", files=files))
    assert [answer[name] for name in ("total", "successful", "failed", "status")] == [5, 4, 1, "partial"]
    assert len({one["model"]["name"] for one in answer["results"] if one["embedding"]}) == 1
    assert (answer["results"][2]["index"], answer["results"][2]["status"]) == (2, "error")
    assert (read["total_images"], read["processed_images"], read["images_with_text"]) == (5, 4, 4)


async def test_faces_are_off_by_default(client: httpx.AsyncClient) -> None:
    for route in ("detect", "recognize", "verify"):
        problem = json(await client.post(f"/faces/{route}", files={"image": SCENE}), 404)
        assert (problem["code"], "NEREID_FACES=true" in problem["detail"]) == ("not_offered", True)


async def test_faces_have_boxes_and_landmarks_as_fractions_and_vectors_of_length_1(faces: httpx.AsyncClient) -> None:
    answer = json(await faces.post("/v1/faces/detect?confidence=0.5", files={"image": SCENE}))
    surer = json(await faces.post("/faces/detect?confidence=0.85", content=SCENE))
    described = json(await faces.post("/faces/recognize", content=SCENE))
    nobody = json(await faces.post("/faces/recognize", content=picture()))

    assert (answer["num_faces"], answer["image"]) == (2, {"width": 200, "height": 100})
    for face, score, corners in zip(answer["faces"], (0.9, 0.8), RECTANGLES.values(), strict=True):
        box = np.array(corners) / [*SIZE, *SIZE]
        points = box[:2] + FACE * (box[2:] - box[:2])
        assert face["score"] == pytest.approx(score, abs=1e-3)
        assert face["box"] == pytest.approx(box, abs=0.01)
        assert face["landmarks"] == pytest.approx(points.ravel(), abs=0.02)
        assert 0 < face["quality"] < face["score"]  # the eyes are near each other
    assert surer["faces"] == answer["faces"][:1]
    vectors = np.array(described["embeddings"])
    assert described["faces"] == answer["faces"]
    assert (vectors.shape, described["truncated"]) == ((2, 12), False)
    assert np.linalg.norm(vectors, axis=1) == pytest.approx([1, 1], abs=1e-6)
    # The first face is red, the other one blue.
    red, _, blue = vectors.reshape(2, 3, 4).sum(axis=2).T
    assert (red > blue).tolist() == [True, False]
    assert (nobody["faces"], nobody["num_faces"], nobody["embeddings"]) == ([], 0, [])


async def test_largest_faces_of_two_images_are_compared(faces: httpx.AsyncClient) -> None:
    """In the scene that is the red face, which is also the surer one; in the other image the blue one."""
    Image.open(BytesIO(SCENE)).resize((400, 200)).save(larger := BytesIO(), "BMP")
    same = json(await faces.post("/faces/verify", files={"image1": SCENE, "image2": larger.getvalue()}))
    files = {"image2": picture(red=(10, 10, 29, 29), blue=(100, 10, 179, 89)), "image1": SCENE}
    other = json(await faces.post("/faces/verify?threshold=0.01", files=files, data={"confidence": "0.3"}))

    assert (same["match"], same["threshold"]) == (True, 0.6)
    assert same["similarity"] == pytest.approx(1, abs=0.05)
    assert (same["image1"], same["image2"]) == ({"num_faces": 2, "face_used": 0}, {"num_faces": 2, "face_used": 0})
    assert other["image2"] == {"num_faces": 2, "face_used": 1}
    assert other["similarity"] == pytest.approx(1 - 0.4 * 2**0.5 / 0.6, abs=0.02)
    assert (other["match"], other["threshold"]) == (True, 0.01)


async def test_text_has_its_place_and_its_scores(client: httpx.AsyncClient) -> None:
    answer = json(await client.post("/v1/ocr/predict?min_rec_score=0.6&shared_client=true", files={"image": SCENE}))

    assert (answer["status"], answer["error"], answer["truncated"], answer["num_texts"]) == ("success", None, False, 2)
    assert ({*answer["texts"]}, answer["image"]) == ({"r", "b"}, {"width": 200, "height": 100})
    assert [region["text"] for region in answer["regions"]] == answer["texts"] == answer["full_text"].split("\n")
    for region in answer["regions"]:
        assert region["rec_score"] == {"r": 0.9, "b": 0.7}[region["text"]]
        assert 0.5 <= region["det_score"] <= 1
        corners = np.array(region["box"]).reshape(4, 2)
        around = np.array([*corners.min(axis=0), *corners.max(axis=0)])
        assert region["box_normalized"] == pytest.approx(around / [*SIZE, *SIZE], abs=1e-5)
        inner = np.array(RECTANGLES["red" if region["text"] == "r" else "blue"])
        assert (around[:2] <= inner[:2] + 2).all()
        assert (around[2:] >= inner[2:] - 2).all()


STEPS = {"objects", "image", "object_embeddings", "faces", "descriptions", "lines", "direction", "text"}


def boxes_of(answer: dict[str, Any], part: str) -> Any:  # noqa: ANN401 - what pytest compares
    return pytest.approx(np.array([each["box"] for each in answer[part]]).reshape(-1, 4), abs=0.02)


async def test_all_parts_come_from_one_image(faces: httpx.AsyncClient) -> None:
    response = await faces.post("/v1/analyze?include_embedding=true&include_face_embeddings=true", files={"image": SCENE})
    answer = json(response)

    assert (answer["status"], answer["errors"], answer["truncated"]) == ("success", {}, False)
    expected = np.array([*RECTANGLES.values()]) / [*SIZE, *SIZE]
    assert (answer["num_detections"], expected) == (2, boxes_of(answer, "detections"))
    assert (answer["num_faces"], expected) == (2, boxes_of(answer, "faces"))
    assert [(each["class_id"], each["class_name"]) for each in answer["detections"]] == [(0, "red"), (1, "blue")]
    vectors = [each["embedding"] for part in ("detections", "faces") for each in answer[part]]
    assert np.linalg.norm([*vectors, answer["global_embedding"]], axis=1) == pytest.approx(np.ones(5), abs=1e-5)
    assert np.array(vectors[0]) @ np.array(vectors[1]) < 0.5
    text = answer["ocr"]
    assert (answer["has_text"], text["texts"], text["full_text"], text["num_texts"]) == (True, ["r"], "r", 1)
    assert [len(text[name]) for name in ("boxes", "boxes_normalized", "det_scores", "rec_scores")] == [1] * 4
    assert answer["timing"].keys() == {f"{step}_ms" for step in STEPS}
    names = [entry.partition(";")[0] for entry in response.headers["server-timing"].split(", ")]
    assert {*names} >= STEPS
    assert names.count("decode") == 1


async def test_results_of_a_batch_are_summaries(faces: httpx.AsyncClient) -> None:
    files = [("images", (f"{index}.png", image)) for index, image in enumerate([SCENE, b"junk", scene("PNG", shift=500)])]
    answer = json(await faces.post("/v1/analyze/batch", files=files))
    full = json(await faces.post("/analyze/batch?enable_ocr=true&include_full_results=true&include_embedding=true", files=files))

    assert (answer["status"], answer["total_images"], answer["processed_images"], answer["failed_images"]) == ("partial", 3, 2, 1)
    assert (answer["total_detections"], answer["total_faces"], answer["images_with_text"]) == (2, 2, 0)
    assert [result["num_detections"] for result in answer["results"]] == [2, 0]
    assert [(failure["filename"], failure["index"]) for failure in answer["failures"]] == [("1.png", 1)]
    assert (full["images_with_text"], full["results"][0]["has_text"], full["results"][0]["ocr"]["texts"]) == (1, True, ["r"])
    assert [len(each["embedding"]) for each in full["results"][0]["detections"]] == [12, 12]
    assert [result["image_index"] for result in full["results"]] == [0, 2]


READS = '[ocr.steps.text]\nmodel = "ocr_recognition"\nof = "lines"\ncrop = "corners"\n'
LINES = '[ocr.steps.lines]\nmodel = "ocr_detection"\n'
FACE_STEPS = '[faces.steps.faces]\nmodel = "faces_detection"\n[faces.steps.descriptions]\nmodel = "bytes_to_logits"\nof = "faces"\n'
BROKEN = LINES.replace("ocr_detection", "missing_model") + READS + '[embedding.steps.image]\nmodel = "six_columns"\n'
OCR = "/ocr/predict"


async def test_part_of_an_analysis_fails_alone(open_gateway: OpenGateway) -> None:
    async with open_gateway(BROKEN) as client:
        answer = json(await client.post("/analyze?include_embedding=true&include_face_embeddings=true", content=SCENE))
        alone = json(await client.post(OCR, content=SCENE), 404)
        batch = json(await client.post("/analyze/batch?enable_ocr=true", files=[("images", SCENE)]))

    assert (answer["status"], answer["num_detections"], answer["num_faces"]) == ("partial", 2, 2)
    assert (answer["ocr"], answer["global_embedding"]) == (None, None)
    wrong = {"code": "wrong_task", "detail": "six_columns gives no vectors"}
    assert answer["errors"] == {"ocr": {"code": "unknown_model", "detail": alone["detail"]}, "embedding": wrong}
    assert (batch["status"], batch["results"][0]["status"], batch["results"][0]["num_detections"]) == ("success", "partial", 2)
    assert batch["results"][0]["errors"].keys() == {"ocr"}


async def test_error_names_what_a_route_cannot_use_of_a_cascade(open_gateway: OpenGateway) -> None:
    pages = f'[ocr.steps.pages]\nmodel = "six_columns"\n{LINES}of = "pages"\n{READS}'
    for cascade, path, status, code, said in (
        (LINES + READS.replace("ocr_recognition", "embedding"), OCR, 400, "wrong_task", "embedding reads no lines of text"),
        (LINES + READS.partition("of =")[0], OCR, 502, "unsupported_model", "what lines finds"),
        (pages, OCR, 502, "unsupported_model", "not about the whole image"),
        (FACE_STEPS, "/faces/recognize", 400, "wrong_task", "bytes_to_logits gives no vectors"),
    ):
        async with open_gateway(cascade) as client:
            problem = json(await client.post(path, content=SCENE), status)
        assert (problem["code"], said in problem["detail"]) == (code, True)


CASCADES = """
[shapes]
title = "Shapes and their colours"
[shapes.steps.shape]
model = "six_columns"
confidence = 0.85
[shapes.steps.colour]
model = "planes_to_logits"
of = "shape"
[shapes.steps.vector]
model = "embedding"
of = "shape"
classes = ["blue"]
[shapes.steps.part]
model = "six_columns:1"
of = "shape"
[shapes.steps.hue]
model = "planes_to_logits"
of = "part"
top_k = 2
[shapes.steps.mood]
model = "planes_to_logits"
[shapes.steps.broken]
model = "lying"
of = "shape"
max_crops = 1

[sorted.steps.kind]
model = "planes_to_logits"

[lost.steps.shape]
model = "six_rows"
"""
SHAPES = "/predict/shapes?confidence=0.5"


@pytest.fixture(scope="module")
async def shapes(served: Settings, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[httpx.AsyncClient]:
    repository = tmp_path_factory.mktemp("cascades")
    (repository / catalog.FILE).write_text(CASCADES)
    own = msgspec.structs.replace(
        served, model_repository=str(repository), model="six_columns", triton_endpoints=served.triton_address
    )
    async with started(create_app(own)) as client:
        yield client


async def test_object_has_what_each_later_step_says_of_it(shapes: httpx.AsyncClient) -> None:
    response = await shapes.post(f"{SHAPES}&boxes=pixel", content=SCENE)
    answer = json(response)
    red, blue = answer["detections"]

    assert [(each["class_name"], each["colour"]["class_name"]) for each in (red, blue)] == [("red", "red"), ("blue", "blue")]
    assert np.linalg.norm(blue["vector"]) == pytest.approx(1)
    assert "vector" not in red
    (part,) = red["part"]
    corners = "x1", "y1", "x2", "y2"
    assert [part[corner] for corner in corners] == pytest.approx([red[corner] for corner in corners], abs=3)
    assert (part["hue"]["class_name"], len(part["hue"]["classifications"])) == ("red", 2)
    assert answer["mood"]["class_name"] == "red"
    assert [(step, error["code"]) for step, error in answer["errors"].items()] == [("broken", "invalid_model_output")]
    assert (answer["truncated"], answer["num_detections"], answer["model"]["name"]) == (True, 2, "six_columns")
    stages = {entry.partition(";")[0].strip() for entry in response.headers["server-timing"].split(",")}
    assert {"shape", "colour", "mood"} <= stages


async def test_parameters_are_those_of_the_first_model_with_the_confidence_of_the_step(shapes: httpx.AsyncClient) -> None:
    (only,) = json(await shapes.post("/predict/shapes", content=SCENE))["detections"]

    assert only["class_name"] == "red"
    assert json(await shapes.post(f"{SHAPES}&classes=blue", content=SCENE))["num_detections"] == 1
    assert "green" in json(await shapes.post(f"{SHAPES}&classes=green", content=SCENE), 400)["detail"]
    assert "top_k" in json(await shapes.post(f"{SHAPES}&top_k=2", content=SCENE), 400)["detail"]
    assert [each["category_id"] for each in json(await shapes.post(f"{SHAPES}&format=coco-results", content=SCENE))] == [0, 1]


async def test_invalid_request_of_a_cascade_is_rejected_with_its_reason(shapes: httpx.AsyncClient) -> None:
    for path, status, said in (
        ("/predict/sorted", 400, "planes_to_logits, the first model of the cascade, is a classifier, which finds no boxes"),
        ("/predict/lost", 404, "six_rows, the first model of the cascade: there is no such model"),
        ("/predict/ocr", 404, "there is no such model"),
    ):
        assert said in json(await shapes.post(path, content=SCENE), status)["detail"]
