"""Masks, keypoints and oriented boxes are those of Ultralytics' predictor, for each form in which a model is exported."""

import json as stdlib_json
from typing import Any

import cv2
import httpx
import msgspec
import numpy as np
import pytest
from pycocotools import mask as coco

from app.__main__ import main
from app.settings.schema import Settings
from tests.reference_detector import QUERY, iou, pair
from tests.support import ROOT, json, triton_home

FOLDER = ROOT / ".task_models"
PICTURES = sorted(FOLDER.glob("pictures/*.png"))
EXPORTS = [(task, form) for task in ("seg", "pose", "obb") for form in ("raw", "nms", "e2e")]
ROUTES = {"seg": "/segment", "pose": "/pose", "obb": "/obb"}
NO_MODELS = "there are no trained models; `./just task-models` makes them"

Object = dict[str, Any]


def is_there(task: str, form: str) -> bool:
    return (FOLDER / task / f"{form}.json").is_file()


@pytest.fixture(scope="module")
def own(settings: Settings, tmp_path_factory: pytest.TempPathFactory) -> Settings:
    """Settings of a Triton with all exports, added as a user adds them."""
    if not is_there("seg", "raw"):
        pytest.skip(NO_MODELS)
    repository = tmp_path_factory.mktemp("tasks") / "repository"
    for task, form in EXPORTS:
        if is_there(task, form):
            export = str(FOLDER / task / f"{form}.onnx")
            assert main(["add", export, "--name", f"{task}_{form}", "--licence", "none", "--out", str(repository)]) == 0
    own = {"model_repository": str(repository), "triton_home": triton_home(tmp_path_factory.mktemp("triton"))}
    return msgspec.structs.replace(settings, **own, model="seg_raw", shapes="square")  # as the predictor was asked


async def ask(gateway: httpx.AsyncClient, task: str, form: str, **parameters: str) -> dict[str, Any]:
    """Return what is found in each picture."""
    found = {}
    for picture in PICTURES:
        query = {**QUERY, "model": f"{task}_{form}", **parameters}
        found[picture.name] = json(await gateway.post(ROUTES[task], params=query, content=picture.read_bytes()))
    return found


def overlap_of_boxes(one: Object, other: Object) -> float:
    return iou(one["box"], [other[name] for name in ("x1", "y1", "x2", "y2")]) if one["class"] == other["class"] else 0.0


def overlap_of_corners(one: Object, other: Object) -> float:
    first, second = np.array(one["corners"], np.float32), np.array(other["corners"], np.float32)
    both = cv2.intersectConvexConvex(first, second)[0]
    union = cv2.contourArea(first) + cv2.contourArea(second) - both
    return float(both / union) if one["class"] == other["class"] else 0.0


@pytest.mark.parametrize(("task", "form"), EXPORTS)
async def test_objects_are_those_of_the_predictor(gateway: httpx.AsyncClient, task: str, form: str) -> None:
    """At IoU 0.9, of corners for oriented boxes; matched masks overlap by 0.95, keypoints are within a pixel, on average."""
    if not is_there(task, form):
        pytest.skip(NO_MODELS)
    expected = stdlib_json.loads((FOLDER / task / f"{form}.json").read_bytes())
    found = await ask(gateway, task, form, **({"masks": "rle"} if task == "seg" else {}))
    overlap = overlap_of_corners if task == "obb" else overlap_of_boxes
    pairs = [both for name in expected for both in pair(expected[name], found[name]["detections"], overlap, 0.9)]
    f1 = 2 * len(pairs) / sum(len(expected[name]) + found[name]["num_detections"] for name in expected)
    print(f"{task} {form}: F1 {f1:.4f}, {len(pairs)} pairs")  # noqa: T201

    assert len(pairs) >= len(PICTURES) / 2
    assert f1 >= 0.98
    if task == "seg":
        overlaps = [float(coco.iou([one["mask"]], [other["mask"]], [0])[0, 0]) for one, other in pairs]
        print(f"masks: {np.mean(overlaps):.4f}, lowest {min(overlaps):.4f}")  # noqa: T201
        assert np.mean(overlaps) >= 0.95
    if task == "pose":
        apart = [
            np.hypot(x - point["x"], y - point["y"])
            for one, other in pairs
            for (x, y, _), point in zip(one["keypoints"], other["keypoints"], strict=True)
        ]
        print(f"keypoints: {np.mean(apart):.3f} pixels, at most {max(apart):.3f}")  # noqa: T201
        assert np.mean(apart) <= 1
