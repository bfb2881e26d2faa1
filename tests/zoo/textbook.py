"""Post-processing as in every tutorial, with which composed models are compared."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.detection.nms import MAX_DETECTIONS, MIN_SCORE
from app.zoo.recipe import RAW_HEADS, DetectionRecipe

MAX_PAIRS = 30_000

Floats = NDArray[np.float32]


class Detections(NamedTuple):
    boxes: Floats
    """(n, 4) x1 y1 x2 y2 in pixels of the input."""
    scores: Floats
    classes: NDArray[np.int32]


def overlap(one: Floats, others: Floats) -> Floats:
    """Return the intersection over union of a box (4,) with boxes (n, 4)."""
    sides = np.minimum(one[2:], others[:, 2:]) - np.maximum(one[:2], others[:, :2])
    shared = np.clip(sides, 0, None).prod(axis=1)
    union = (one[2:] - one[:2]).prod() + (others[:, 2:] - others[:, :2]).prod(axis=1) - shared
    result: Floats = shared / union
    return result


def textbook(head: Floats, recipe: DetectionRecipe) -> Detections:
    """Decode the head of one image, then suppress class by class, as in every tutorial."""
    if recipe.head == "yolo":
        centres, sizes, scores = head[:2].T, head[2:4].T, head[4:].T
    elif recipe.head == "yolov5":
        centres, sizes, scores = head[:, :2], head[:, 2:4], head[:, 4:5] * head[:, 5:]
    else:
        width, height = recipe.size
        cells = [(x, y, s) for s in (8, 16, 32) for y in range(height // s) for x in range(width // s)]
        grid, stride = np.split(np.array(cells, np.float32), [2], axis=1)
        centres, sizes = (head[:, :2] + grid) * stride, np.exp(head[:, 2:4]) * stride
        scores = head[:, 4:5] * head[:, 5:]
    corners = np.hstack([centres - sizes / 2, centres + sizes / 2]).astype(np.float32)
    if recipe.box_units == "normalized":
        corners *= np.array(recipe.size * 2, np.float32)
    is_best = scores == scores.max(axis=1, keepdims=True)
    anchors, label = np.nonzero((scores > recipe.floor) & (is_best | recipe.multi_label))
    corners, best = corners[anchors], scores[anchors, label]
    ranks, kept = np.argsort(-best)[:MAX_PAIRS], []
    for class_id in np.unique(label):
        remaining = [i for i in ranks if label[i] == class_id]
        while remaining:
            first = remaining.pop(0)
            kept.append(first)
            remaining = [
                i for i, iou in zip(remaining, overlap(corners[first], corners[remaining]), strict=True) if iou <= recipe.iou
            ]
    kept = sorted(kept, key=lambda i: -best[i])[:MAX_DETECTIONS]
    return Detections(corners[kept], best[kept], label[kept].astype(np.int32))


def assert_same(found: Detections, expected: Detections) -> None:
    """Compare detections, ignoring the order of equal scores."""
    assert sorted(found.classes) == sorted(expected.classes)
    for box, score, label in zip(*found, strict=True):
        same_class = np.flatnonzero(expected.classes == label)
        overlaps = overlap(box, expected.boxes[same_class])
        nearest = same_class[overlaps.argmax()]
        assert overlaps.max() >= 0.99
        assert abs(score - expected.scores[nearest]) <= 0.01


def found_once(tensors: Mapping[str, Floats], recipe: DetectionRecipe) -> Detections:
    """Decode the tensors of one image in which each object is found once."""
    match recipe.head, list(tensors.values()):
        case "end_to_end" | "rtdetr_topk", [head]:
            boxes, scores, classes = head[:, :4], head[:, 4], head[:, 5]
        case "rtdetr", [head]:
            boxes, scores, classes = head[:, :4], head[:, 4:].max(axis=1), head[:, 4:].argmax(axis=1)
        case "rfdetr", [boxes, logits]:
            probabilities = (1 / (1 + np.exp(-logits[:, :-1]))).astype(np.float32)
            query, classes = np.divmod(np.arange(probabilities.size), probabilities.shape[1])
            boxes, scores = boxes[query], probabilities.ravel()
        case _:
            classes, boxes, scores = tensors.values()
    if recipe.head in ("rtdetr", "rtdetr_topk", "rfdetr"):
        boxes = np.hstack([boxes[:, :2] - boxes[:, 2:] / 2, boxes[:, :2] + boxes[:, 2:] / 2])
    if recipe.head != "end_to_end" or recipe.box_units == "normalized":
        boxes = boxes * np.array(recipe.size * 2, np.float32)
    kept = np.argsort(-scores, kind="stable")[:MAX_DETECTIONS]
    kept = kept[scores[kept] > MIN_SCORE]
    return Detections(boxes[kept].astype(np.float32), scores[kept], classes[kept].astype(np.int32))


def objects_of(tensors: Mapping[str, NDArray[Any]], recipe: DetectionRecipe) -> Detections:
    """Decode the tensors of one image."""
    exact = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    return textbook(next(iter(exact.values())), recipe) if recipe.head in RAW_HEADS else found_once(exact, recipe)
