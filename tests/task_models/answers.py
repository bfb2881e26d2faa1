"""The shapes in a picture, and what Ultralytics' predictor finds in it, as JSON."""

from pathlib import Path

import numpy as np
import torch
from pycocotools import mask as rle
from ultralytics import YOLO
from ultralytics.engine.results import Results
from ultralytics.utils.ops import scale_masks

from tests.task_models.shapes import SIZE, Shape

Answer = dict[str, object]


def describe(shape: Shape) -> Answer:
    """Return a shape in the form of an answer."""
    return {
        "class": shape.kind,
        "box": [*shape.outline.min(0), *shape.outline.max(0)],
        "polygon": shape.outline.tolist(),
        "keypoints": shape.keypoints.tolist(),
        "corners": shape.corners.tolist(),
    }


def predict(weights: Path, pictures: list[Path], *, nms: bool | None) -> dict[str, list[Answer]]:
    """Ask the predictor, whose input is the padded square as with an exported model.

    Returns:
        For each picture's name the objects, best first, with `class`, `score` and, in pixels of the picture, `box`
        [x1, y1, x2, y2] and what the task adds: `polygon` [P, 2] and `mask` in COCO's compressed RLE, or `keypoints` [3, 3] with
        confidence, or `rotated` [x, y, width, height, radians] and `corners` [4, 2].
    """
    model = YOLO(weights)
    options = {
        "imgsz": SIZE,
        "rect": False,
        "conf": 0.25,
        "iou": 0.7,
        "max_det": 300,
        "nms": nms,
        "device": "cpu",
        "verbose": False,
    }
    return {picture.name: _answers(model(picture, **options)[0]) for picture in pictures}


def _answers(result: Results) -> list[Answer]:
    found = result.boxes if result.obb is None else result.obb
    columns = {"class": found.cls.int().tolist(), "score": found.conf.tolist(), "box": found.xyxy.tolist()}
    if result.masks is not None:
        masks = scale_masks(result.masks.data[None], result.orig_shape)[0] > 0.5
        columns |= {"polygon": [polygon.tolist() for polygon in result.masks.xy], "mask": [_encode(mask) for mask in masks]}
    if result.keypoints is not None:
        columns["keypoints"] = result.keypoints.data.tolist()
    if result.obb is not None:
        columns |= {"rotated": found.xywhr.tolist(), "corners": found.xyxyxyxy.tolist()}
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _encode(mask: torch.Tensor) -> dict[str, object]:
    """Return a mask [height, width] in COCO's compressed RLE."""
    encoded = rle.encode(np.asfortranarray(mask.numpy().astype(np.uint8)))
    return {"size": encoded["size"], "counts": encoded["counts"].decode()}
