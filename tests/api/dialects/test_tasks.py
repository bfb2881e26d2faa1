"""Each dialect's answer about masks, keypoints, oriented boxes and classes; models get the image at half its size from row 8 on."""

from base64 import b64encode
from collections.abc import AsyncIterator
from math import pi
from typing import Any

import cv2
import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from app.main import create_app
from app.settings.schema import DIALECTS
from tests.api.conftest import settings_for
from tests.fakes.triton import CONFIG, FakeTriton, infer_response, serving
from tests.support import json, started

IMAGE = cv2.imencode(".png", np.full((32, 64, 3), 255, np.uint8))[1].tobytes()
TEXT = b64encode(IMAGE).decode()
NAMES = ("cat", "dog")
OUTPUTS: dict[str, NDArray[Any]] = {
    "num_dets": np.array([2], np.int32),
    "det_scores": np.array([0.9, 0.8, 0], np.float32),
    "det_classes": np.array([1, 0, 0], np.int32),
}
BOXES = np.array([[4, 12, 12, 20], [16, 10, 28, 22], [0, 0, 0, 0]], np.float32)

# Two areas for the first object, of which the second has the shape of an L; nothing for the other one.
PROTOTYPES = np.full((1, 8, 8), -1, np.float16)
PROTOTYPES[0, 3:5, 1] = PROTOTYPES[0, 2:5, 4:6] = PROTOTYPES[0, 4, 6] = 1

KEYPOINTS = np.array([[[6, 14, 0.9], [10, 18, 0.25]], [[20, 12, 0.75], [24, 20, 0.5]], [[0, 0, 0]] * 2], np.float32)
TASKS: dict[str, dict[str, NDArray[Any]]] = {
    "segment": {
        "det_boxes": np.array([[0, 8, 32, 24], BOXES[0], BOXES[2]], np.float32),
        "det_masks": np.array([[1], [0], [0]], np.float32),
        "prototypes": PROTOTYPES,
    },
    "pose": {"det_boxes": BOXES, "det_keypoints": KEYPOINTS},
    "points": {"det_boxes": BOXES, "det_keypoints": KEYPOINTS[..., :2]},
    "obb": {
        "det_boxes": np.array([[4, 12, 12, 16], [16, 10, 24, 14], BOXES[2]], np.float32),
        "det_angles": np.array([0, pi / 2, 0], np.float32),
    },
}
# Models of these tasks find no objects; their configs name the task.
NO_OBJECTS: dict[str, dict[str, NDArray[Any]]] = {
    "embedding": {"vector": np.array([3, 4], np.float32)},
    "text_detection": {"map": np.zeros((8, 8), np.float32)},
    "text_recognition": {"steps": np.zeros(4, np.int32), "scores": np.zeros(4, np.float32)},
}


def triton_for(task: str) -> FakeTriton:
    outputs = {"scores": np.array([0.2, 0.8], np.float32)} if task == "classify" else NO_OBJECTS.get(task, OUTPUTS)
    outputs = outputs | TASKS.get(task, {})
    parameters = {"labels": ",".join(NAMES), "keypoints": '["nose", "tail"]', **({"task": task} if task in NO_OBJECTS else {})}
    fake = FakeTriton()
    kinds = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "int32": "TYPE_INT32"}
    fake.config = {
        **CONFIG,
        "output": [{"name": name, "data_type": kinds[value.dtype.name], "dims": value.shape} for name, value in outputs.items()],
        "parameters": {name: {"string_value": text} for name, text in parameters.items()},
    }
    fake.answer = infer_response(**outputs)
    fake.index = [("tiny", "1", "READY", "")]
    return fake


@pytest.fixture
def fake(request: pytest.FixtureRequest) -> FakeTriton:
    """A Triton whose models all have the task of the test."""
    return triton_for(request.param)


@pytest.fixture
async def client(fake: FakeTriton) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application whose default models are `tiny`, and `parts` and `people` for masks and keypoints."""
    options = {"task_models": "segmentation=parts,pose=people", "dialects": ",".join(DIALECTS)}
    async with serving(fake), started(create_app(settings_for(fake.url, **options))) as made:
        yield made


def models_of(*tasks: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("fake", tasks, indirect=True)


async def parts_of_mask(client: httpx.AsyncClient) -> list[list[list[float]]]:
    """Return the polygons of the first object, flat, as the gateway itself answers."""
    first, second = json(await client.post("/segment?boxes=pixel&model=tiny", content=IMAGE))["detections"]
    assert (len(first["mask"]), second["mask"]) == (2, [])
    found: list[list[list[float]]] = first["mask"]
    return found


async def by_roboflow(client: httpx.AsyncClient, route: str, **parameters: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Ask for the model at v0 and v1, and at v1 without a name; return their answer, without the random ids."""
    content = {"image": {"type": "base64", "value": TEXT}, **parameters}
    responses = [
        await client.post(f"/infer/{route}", json={**content, "model_id": "tiny/1"}),
        await client.post(f"/infer/{route}", json={**content, "model": "tiny"}),
        await client.post("/tiny/1", params=parameters, content=IMAGE),
    ]
    found: list[dict[str, Any]]
    found, *others = ([one | {"detection_id": 0} for one in json(each)["predictions"]] for each in responses)
    assert others == [found] * 2
    return found


async def by_ultralytics(client: httpx.AsyncClient, **data: str) -> list[dict[str, Any]]:
    (image,) = json(await client.post("/api/models/tiny/predict", files={"file": IMAGE}, data=data))["images"]
    found: list[dict[str, Any]] = image["results"]
    assert [(one["class"], one["name"], one["confidence"]) for one in found] == [(1, "dog", 0.9), (0, "cat", 0.8)]
    return found


@models_of("segment")
async def test_masks_are_the_largest_part_or_all_parts_joined(client: httpx.AsyncClient) -> None:
    """An empty mask has no points; clients need the list."""
    parts = await parts_of_mask(client)
    largest = max(parts, key=len)
    points = [{"x": x, "y": y} for x, y in zip(largest[::2], largest[1::2], strict=True)]
    dog = {"x": 32, "y": 16, "width": 64, "height": 32, "confidence": 0.9, "class": "dog", "class_id": 1, "detection_id": 0}
    cat = {"x": 16, "y": 16, "width": 16, "height": 16, "confidence": 0.8, "class": "cat", "class_id": 0, "detection_id": 0}
    assert await by_roboflow(client, "instance_segmentation") == [{**dog, "points": points}, {**cat, "points": []}]

    polygons = [np.array(part, np.float32).reshape(-1, 2) for part in parts]
    first, second = await by_ultralytics(client)
    path = np.array([first["segments"]["x"], first["segments"]["y"]], np.float32).T
    assert {tuple(point) for point in path.tolist()} == {tuple(point) for part in polygons for point in part.tolist()}
    assert cv2.contourArea(path) == pytest.approx(sum(map(cv2.contourArea, polygons)))
    assert second["segments"] == {"x": [], "y": []}
    assert second["box"] == {"x1": 8, "y1": 8, "x2": 24, "y2": 24}


@models_of("pose")
async def test_keypoints_have_names_or_fractions(client: httpx.AsyncClient) -> None:
    expected = [
        {"x": 12, "y": 12, "confidence": 0.9, "class_id": 0, "class": "nose"},
        {"x": 20, "y": 20, "confidence": 0.25, "class_id": 1, "class": "tail"},
    ]
    first, second = await by_roboflow(client, "keypoints_detection")
    surer, _ = await by_roboflow(client, "keypoints_detection", keypoint_confidence=0.3)
    pixels, fractions = await by_ultralytics(client), await by_ultralytics(client, normalize="true")

    assert (first["x"], first["y"], first["width"], first["height"], first["class"]) == (16, 16, 16, 16, "dog")
    assert first["keypoints"] == expected
    assert [(point["x"], point["y"]) for point in second["keypoints"]] == [(40, 8), (48, 24)]
    assert surer["keypoints"] == expected[:1]
    assert pixels[0]["keypoints"] == {"x": [12, 20], "y": [12, 20], "visible": [0.9, 0.25]}
    assert fractions[1]["keypoints"] == {"x": [0.625, 0.75], "y": [0.25, 0.75], "visible": [0.75, 0.5]}


@models_of("obb")
async def test_oriented_boxes_have_four_corners(client: httpx.AsyncClient) -> None:
    """In the order of `Results.obb.xyxyxyxy`: against the clock, from the bottom right of a box that is not turned."""
    pixels, fractions = await by_ultralytics(client), await by_ultralytics(client, normalize="true")

    box = pixels[0]["box"]
    assert box == {"x1": 24, "y1": 16, "x2": 24, "y2": 8, "x3": 8, "y3": 8, "x4": 8, "y4": 16}
    assert [*pixels[1]["box"].values()] == [36, 16, 44, 16, 44, 0, 36, 0]
    assert fractions[0]["box"] == {name: value / (64 if name[0] == "x" else 32) for name, value in box.items()}


@models_of("classify")
async def test_classes_have_no_boxes(client: httpx.AsyncClient) -> None:
    (image,) = json(await client.post("/predict", files={"file": IMAGE}, data={"conf": "0.99"}))["images"]

    assert [(one["class"], one["name"]) for one in image["results"]] == [(1, "dog"), (0, "cat")]
    assert set(image["results"][0]) == {"class", "name", "confidence"}
    assert image["shape"] == [32, 64]


@models_of(*NO_OBJECTS)
async def test_model_that_finds_no_objects_is_an_error_that_names_its_route(
    client: httpx.AsyncClient, request: pytest.FixtureRequest
) -> None:
    """Only KServe's clients and `/predict` can ask for a vector."""
    task = request.node.callspec.params["fake"]
    image, tensor = {"type": "base64", "value": TEXT}, {"name": "x", "shape": [1], "datatype": "BYTES", "data": [TEXT]}
    answers = {
        "roboflow": await client.post("/infer/object_detection", json={"image": image, "model_id": "tiny"}),
        "ultralytics": await client.post("/api/models/tiny/predict", files={"file": IMAGE}),
        "nim": await client.post("/v1/infer", json={"input": [{"type": "image_url", "url": f"data:image/png;base64,{TEXT}"}]}),
        "deepstack": await client.post("/v1/vision/custom/tiny", files={"image": IMAGE}),
        "kserve": await client.post("/v2/models/tiny/infer", json={"inputs": [tensor]}),
        "predict": await client.post("/predict/tiny", content=IMAGE),
    }

    route = "/embed/image" if task == "embedding" else "/ocr/predict"
    if task == "embedding":
        (output,) = json(answers.pop("kserve"))["outputs"]
        assert output["data"] == pytest.approx([0.6, 0.8])
        assert json(answers.pop("predict"))["embedding"] == pytest.approx([0.6, 0.8])
    for name, answer in answers.items():
        assert (name, answer.status_code, route in answer.text) == (name, 400, True)
