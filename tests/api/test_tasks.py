"""Models that find more than boxes, or none: hostile outputs, extras that are not installed, and what each dialect answers."""

import sys
from base64 import b64encode
from collections.abc import AsyncIterator, Container
from contextlib import asynccontextmanager
from math import pi
from typing import Any

import cv2
import httpx
import numpy as np
import pytest
from numpy.typing import NDArray

from app.errors import GatewayFull
from app.resilience.fairness import Caller
from app.resilience.memory import MemoryBudget, Reservation
from app.settings.schema import DIALECTS
from tests.api.conftest import client_for
from tests.fakes.triton import CONFIG, FakeTriton, infer_response
from tests.support import SCENE, json

Outputs = dict[str, NDArray[Any]]

IMAGE = cv2.imencode(".png", np.full((32, 64, 3), 255, np.uint8))[1].tobytes()
ROWS, ANCHORS = 5, 21
COMPOSED: Outputs = {
    "num_dets": np.array([ROWS], np.int32),
    "det_boxes": np.tile(np.array([2, 10, 30, 22], np.float32), (ROWS, 1)),
    "det_scores": np.full(ROWS, 0.9, np.float32),
    "det_classes": np.zeros(ROWS, np.int32),
}
PROTOTYPES: Outputs = {"prototypes": np.ones((2, 8, 8), np.float16)}
FEATURES: dict[str, Outputs] = {
    "segment": {"det_masks": np.ones((ROWS, 2), np.float32), **PROTOTYPES},
    "pose": {"det_keypoints": np.full((ROWS, 2, 3), 0.5, np.float32)},
    "obb": {"det_angles": np.full(ROWS, 0.5, np.float32)},
}
FEATURE_ROWS = {"segment": 2, "pose": 6, "obb": 1}
QUESTIONS = ("max_detections=300", "format=image", "format=coco-results")
MASKS = ("masks=rle&max_detections=300", "masks=png", "masks=none")


def hostile(outputs: Outputs) -> dict[str, Outputs]:
    """Return variants of the outputs of a model, by description; the first one are the outputs themselves."""
    found: dict[str, Outputs] = {"unchanged": outputs, "nothing": {}}
    for name in outputs.keys() - {"det_scores", "det_classes"}:  # as in detectors
        tensor = outputs[name]
        changed: Outputs = {
            "UINT8": tensor.astype(np.uint8),
            "empty": tensor[..., :0],
            "no rows": tensor[:0],
            "one row less": tensor[1:],
            "one column less": tensor[..., :-1],
            "flat": tensor.ravel(),
            "one number": tensor.ravel()[0],
            "another dimension": tensor[None],
        }
        values = (-1, 0, 1, ROWS + 1, 2**31 - 1) if tensor.dtype == np.int32 else (np.nan, np.inf, 0, -1, 6e4, 9e8, 3e38, -3e38)
        for value in values:
            with np.errstate(over="ignore"):  # in FP16
                changed[f"{value}"] = np.full_like(tensor, value)
            changed[f"{value} at an end"] = np.concatenate([tensor[:-1], changed[f"{value}"][-1:]])
            changed[f"{value} at the end of rows"] = np.concatenate([tensor[..., :-1], changed[f"{value}"][..., -1:]], axis=-1)
        found |= {f"{name}: {change}": outputs | {name: one} for change, one in changed.items()}
    if "num_dets" in outputs:
        for repeats in (0, 60):
            rows = {name: np.concatenate([each[:0], *[each] * repeats]) for name, each in outputs.items() if len(each) == ROWS}
            found[f"{repeats * ROWS} rows"] = outputs | rows | {"num_dets": np.array([repeats * ROWS], np.int32)}
    return found


@pytest.mark.parametrize("task", FEATURES)
@pytest.mark.parametrize("is_raw", [False, True], ids=["composed", "raw"])
async def test_hostile_outputs_are_answered_or_the_fault_of_the_model(task: str, *, is_raw: bool) -> None:
    """All dimensions of the outputs that may be dynamic are, so that Triton would send such tensors."""
    outputs = COMPOSED | FEATURES[task]
    if is_raw:
        head = np.full((5 + FEATURE_ROWS[task], ANCHORS), 0.5, np.float32)
        head[:4] = 16
        outputs = {"head": head} | (PROTOTYPES if task == "segment" else {})
    unexpected: dict[tuple[str, str], tuple[int, str]] = {}
    async with gateway(task, outputs) as (fake, client):
        for change, changed in hostile(outputs).items():
            fake.answer = infer_response(**changed)
            for question in (*QUESTIONS, *(MASKS if task == "segment" else ())):
                response = await client.post(f"/{task}?model=tiny&confidence=0&{question}", content=IMAGE)
                if response.status_code == 502 and change != "unchanged":
                    break  # as for the other questions, which read the same outputs
                if response.status_code != 200 or b":null" in response.content:
                    unexpected[change, question] = response.status_code, response.text[:200]

    assert unexpected == {}


def triton_with(outputs: Outputs, parameters: dict[str, str], dynamic: Container[int] = ()) -> FakeTriton:
    kinds = {"float32": "TYPE_FP32", "float16": "TYPE_FP16", "int32": "TYPE_INT32"}
    fake = FakeTriton()
    fake.config = {
        **CONFIG,
        "output": [
            {
                "name": name,
                "data_type": kinds[value.dtype.name],
                "dims": [-1 if size in dynamic else size for size in value.shape],
            }
            for name, value in outputs.items()
        ],
        "parameters": {name: {"string_value": text} for name, text in parameters.items()},
    }
    fake.answer = infer_response(**outputs)
    return fake


@asynccontextmanager
async def gateway(task: str, outputs: Outputs) -> AsyncIterator[tuple[FakeTriton, httpx.AsyncClient]]:
    metadata = {"task": task, "kpt_shape": [2, 3], "names": {0: "cat"}}
    fake = triton_with(outputs, {"metadata": repr(metadata)}, dynamic={ROWS, ANCHORS, 8})
    async with client_for(fake) as client:
        yield fake, client


async def test_masks_of_a_batch_take_memory_for_images(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(Reservation):
        def add(self, nbytes: int, *, is_refused: bool = True) -> None:
            raise GatewayFull(f"no room for {nbytes} bytes", "memory" if is_refused else "")

    def reserve(budget: MemoryBudget, caller: Caller, purpose: str = "") -> Reservation:
        return (Full if purpose == "the results of this batch" else Reservation)(purpose, caller, budget)

    async with gateway("segment", COMPOSED | FEATURES["segment"]) as (_, client):
        files = [("images", IMAGE)] * 3
        answered = await client.post("/segment/batch?model=tiny", files=files)
        alone = await client.post("/segment?model=tiny", content=IMAGE)
        monkeypatch.setattr(MemoryBudget, "reserve", reserve)
        refused = await client.post("/segment/batch?model=tiny", files=files)

    assert [result["detections"] for result in answered.json()["results"]] == [alone.json()["detections"]] * 3
    assert [failure["problem"]["code"] for failure in refused.json()["failures"]] == ["gateway_full"] * 3


async def test_text_without_its_extra_is_not_offered(client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyclipper", None)
    expected = "finding text needs what is not installed: pyclipper; pip install 'nereid-gateway[ocr]'"
    problem = json(await client.post("/ocr/predict", content=SCENE), status=404)
    answer = json(await client.post("/analyze", content=SCENE))

    assert (problem["code"], problem["detail"]) == ("not_offered", expected)
    assert answer["errors"]["ocr"] == {"code": "not_offered", "detail": expected}


# Of each dialect: models get the image at half its size from row 8 on.
TEXT = b64encode(IMAGE).decode()
OUTPUTS: Outputs = {
    "num_dets": np.array([2], np.int32),
    "det_scores": np.array([0.9, 0.8, 0], np.float32),
    "det_classes": np.array([1, 0, 0], np.int32),
}
BOXES = np.array([[4, 12, 12, 20], [16, 10, 28, 22], [0, 0, 0, 0]], np.float32)

# Two areas for the first object, of which the second has the shape of an L; nothing for the other one.
AREAS = np.full((1, 8, 8), -1, np.float16)
AREAS[0, 3:5, 1] = AREAS[0, 2:5, 4:6] = AREAS[0, 4, 6] = 1

KEYPOINTS = np.array([[[6, 14, 0.9], [10, 18, 0.25]], [[20, 12, 0.75], [24, 20, 0.5]], [[0, 0, 0]] * 2], np.float32)
TASKS: dict[str, Outputs] = {
    "segment": {
        "det_boxes": np.array([[0, 8, 32, 24], BOXES[0], BOXES[2]], np.float32),
        "det_masks": np.array([[1], [0], [0]], np.float32),
        "prototypes": AREAS,
    },
    "pose": {"det_boxes": BOXES, "det_keypoints": KEYPOINTS},
    "points": {"det_boxes": BOXES, "det_keypoints": KEYPOINTS[..., :2]},
    "obb": {
        "det_boxes": np.array([[4, 12, 12, 16], [16, 10, 24, 14], BOXES[2]], np.float32),
        "det_angles": np.array([0, pi / 2, 0], np.float32),
    },
}
# Models of these tasks find no objects; their configs name the task.
NO_OBJECTS: dict[str, Outputs] = {
    "embedding": {"vector": np.array([3, 4], np.float32)},
    "text_detection": {"map": np.zeros((8, 8), np.float32)},
    "text_recognition": {"steps": np.zeros(4, np.int32), "scores": np.zeros(4, np.float32)},
}


def triton_for(task: str) -> FakeTriton:
    outputs = {"scores": np.array([0.2, 0.8], np.float32)} if task == "classify" else NO_OBJECTS.get(task, OUTPUTS)
    parameters = {"labels": "cat,dog", "keypoints": '["nose", "tail"]', **({"task": task} if task in NO_OBJECTS else {})}
    fake = triton_with(outputs | TASKS.get(task, {}), parameters)
    fake.index = [("tiny", "1", "READY", "")]
    return fake


@pytest.fixture
async def caller(request: pytest.FixtureRequest) -> AsyncIterator[httpx.AsyncClient]:
    """A client of an application whose models all have the task of the test; those for masks and keypoints have their own names."""
    names = "segmentation=parts,pose=people"
    async with client_for(triton_for(request.param), task_models=names, dialects=",".join(DIALECTS)) as made:
        yield made


def models_of(*tasks: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("caller", tasks, indirect=True)


async def by_roboflow(caller: httpx.AsyncClient, route: str, **parameters: Any) -> list[dict[str, Any]]:  # noqa: ANN401
    """Ask for the model at v0 and v1, and at v1 without a name; return their answer, without the random ids."""
    content = {"image": {"type": "base64", "value": TEXT}, **parameters}
    responses = [
        await caller.post(f"/infer/{route}", json={**content, "model_id": "tiny/1"}),
        await caller.post(f"/infer/{route}", json={**content, "model": "tiny"}),
        await caller.post("/tiny/1", params=parameters, content=IMAGE),
    ]
    found: list[dict[str, Any]]
    found, *others = ([one | {"detection_id": 0} for one in json(each)["predictions"]] for each in responses)
    assert others == [found] * 2
    return found


async def by_ultralytics(caller: httpx.AsyncClient, **data: str) -> list[dict[str, Any]]:
    (image,) = json(await caller.post("/api/models/tiny/predict", files={"file": IMAGE}, data=data))["images"]
    found: list[dict[str, Any]] = image["results"]
    assert [(one["class"], one["name"], one["confidence"]) for one in found] == [(1, "dog", 0.9), (0, "cat", 0.8)]
    return found


@models_of("segment")
async def test_masks_are_the_largest_part_or_all_parts_joined(caller: httpx.AsyncClient) -> None:
    """An empty mask has no points; clients need the list."""
    own, empty = json(await caller.post("/segment?boxes=pixel&model=tiny", content=IMAGE))["detections"]
    parts: list[list[float]] = own["mask"]
    assert (len(parts), empty["mask"]) == (2, [])
    largest = max(parts, key=len)
    points = [{"x": x, "y": y} for x, y in zip(largest[::2], largest[1::2], strict=True)]
    dog = {"x": 32, "y": 16, "width": 64, "height": 32, "confidence": 0.9, "class": "dog", "class_id": 1, "detection_id": 0}
    cat = {"x": 16, "y": 16, "width": 16, "height": 16, "confidence": 0.8, "class": "cat", "class_id": 0, "detection_id": 0}
    assert await by_roboflow(caller, "instance_segmentation") == [{**dog, "points": points}, {**cat, "points": []}]

    polygons = [np.array(part, np.float32).reshape(-1, 2) for part in parts]
    first, second = await by_ultralytics(caller)
    path = np.array([first["segments"]["x"], first["segments"]["y"]], np.float32).T
    assert {tuple(point) for point in path.tolist()} == {tuple(point) for part in polygons for point in part.tolist()}
    assert cv2.contourArea(path) == pytest.approx(sum(map(cv2.contourArea, polygons)))
    assert second["segments"] == {"x": [], "y": []}
    assert second["box"] == {"x1": 8, "y1": 8, "x2": 24, "y2": 24}


@models_of("pose")
async def test_keypoints_have_names_or_fractions(caller: httpx.AsyncClient) -> None:
    expected = [
        {"x": 12, "y": 12, "confidence": 0.9, "class_id": 0, "class": "nose"},
        {"x": 20, "y": 20, "confidence": 0.25, "class_id": 1, "class": "tail"},
    ]
    first, second = await by_roboflow(caller, "keypoints_detection")
    surer, _ = await by_roboflow(caller, "keypoints_detection", keypoint_confidence=0.3)
    pixels, fractions = await by_ultralytics(caller), await by_ultralytics(caller, normalize="true")

    assert (first["x"], first["y"], first["width"], first["height"], first["class"]) == (16, 16, 16, 16, "dog")
    assert first["keypoints"] == expected
    assert [(point["x"], point["y"]) for point in second["keypoints"]] == [(40, 8), (48, 24)]
    assert surer["keypoints"] == expected[:1]
    assert pixels[0]["keypoints"] == {"x": [12, 20], "y": [12, 20], "visible": [0.9, 0.25]}
    assert fractions[1]["keypoints"] == {"x": [0.625, 0.75], "y": [0.25, 0.75], "visible": [0.75, 0.5]}


@models_of("obb")
async def test_oriented_boxes_have_four_corners(caller: httpx.AsyncClient) -> None:
    """In the order of `Results.obb.xyxyxyxy`: against the clock, from the bottom right of a box that is not turned."""
    pixels, fractions = await by_ultralytics(caller), await by_ultralytics(caller, normalize="true")

    box = pixels[0]["box"]
    assert box == {"x1": 24, "y1": 16, "x2": 24, "y2": 8, "x3": 8, "y3": 8, "x4": 8, "y4": 16}
    assert [*pixels[1]["box"].values()] == [36, 16, 44, 16, 44, 0, 36, 0]
    assert fractions[0]["box"] == {name: value / (64 if name[0] == "x" else 32) for name, value in box.items()}


@models_of("classify")
async def test_classes_have_no_boxes(caller: httpx.AsyncClient) -> None:
    (image,) = json(await caller.post("/predict", files={"file": IMAGE}, data={"conf": "0.99"}))["images"]

    assert [(one["class"], one["name"]) for one in image["results"]] == [(1, "dog"), (0, "cat")]
    assert set(image["results"][0]) == {"class", "name", "confidence"}
    assert image["shape"] == [32, 64]


@models_of(*NO_OBJECTS)
async def test_model_that_finds_no_objects_is_an_error_that_names_its_route(
    caller: httpx.AsyncClient, request: pytest.FixtureRequest
) -> None:
    """Only KServe's clients and `/predict` can ask for a vector."""
    task = request.node.callspec.params["caller"]
    image, tensor = {"type": "base64", "value": TEXT}, {"name": "x", "shape": [1], "datatype": "BYTES", "data": [TEXT]}
    answers = {
        "roboflow": await caller.post("/infer/object_detection", json={"image": image, "model_id": "tiny"}),
        "ultralytics": await caller.post("/api/models/tiny/predict", files={"file": IMAGE}),
        "nim": await caller.post("/v1/infer", json={"input": [{"type": "image_url", "url": f"data:image/png;base64,{TEXT}"}]}),
        "deepstack": await caller.post("/v1/vision/custom/tiny", files={"image": IMAGE}),
        "kserve": await caller.post("/v2/models/tiny/infer", json={"inputs": [tensor]}),
        "predict": await caller.post("/predict/tiny", content=IMAGE),
    }

    route = "/embed/image" if task == "embedding" else "/ocr/predict"
    if task == "embedding":
        (output,) = json(answers.pop("kserve"))["outputs"]
        assert output["data"] == pytest.approx([0.6, 0.8])
        assert json(answers.pop("predict"))["embedding"] == pytest.approx([0.6, 0.8])
    for name, answer in answers.items():
        assert (name, answer.status_code, route in answer.text) == (name, 400, True)
