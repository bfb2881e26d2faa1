"""The objects that a step has found, and the parts of the image that a later step is asked about."""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from app.cascade.definition import Step
from app.detection.select import to_class_ids
from app.errors import UnsupportedModel
from app.imaging.patch import Patch
from app.model.spec import ModelSpec
from app.obb.boxes import enclose
from app.pipeline.results import Detections, StepResult, TextRegions


def find_parts(image: Patch, results: Sequence[StepResult], step: Step, spec: ModelSpec) -> list[tuple[float, Patch | None]]:
    """Return the objects in all results of a step, one after the other, for a later step and its model.

    Each has the score or the size, as the later step orders them, and the part of the decoded image; None if that is empty, or
    the object has none of the classes of the later step. Raises UnsupportedModel without what the later step needs of objects.
    """
    parts: list[tuple[float, Patch | None]] = []
    for result in results:
        if not isinstance(result, Detections | TextRegions):
            raise UnsupportedModel(f"{result.spec.name} finds no objects that {spec.name} can be asked about")
        boxes = result.boxes if isinstance(result, Detections) else enclose(result.corners)
        class_ids = result.class_ids.tolist() if isinstance(result, Detections) else [0] * len(boxes)
        wanted = to_class_ids(step.classes or None, result.spec.labels)
        ranks = result.scores if step.order == "score" else (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
        points = _find_points(result, step, spec)
        for index, (rank, box) in enumerate(zip(ranks.tolist(), boxes.tolist(), strict=True)):
            is_wanted = wanted is None or class_ids[index] in wanted
            parts.append((rank, _crop(image, box, None if points is None else points[index], step) if is_wanted else None))
    return parts


def _find_points(result: Detections | TextRegions, step: Step, spec: ModelSpec) -> NDArray[np.float32] | None:
    """Return the corners or landmarks (n, points, 2) of objects, as the later step needs them; None for boxes."""
    points = None
    if step.crop == "corners":
        points = _from_top_left(result.corners) if isinstance(result, Detections) else result.corners
    elif step.crop == "landmarks" and isinstance(result, Detections) and result.keypoints is not None:
        points = result.keypoints[..., :2]
        if points.shape[1] * 2 != len(spec.landmarks):
            raise UnsupportedModel(
                f"{spec.name} is aligned by {len(spec.landmarks) // 2} landmarks, {result.spec.name} finds {points.shape[1]}"
            )
    if points is None and step.crop != "box":
        raise UnsupportedModel(f"{result.spec.name} finds no {step.crop}, by which objects are cropped for {spec.name}")
    return points


def _from_top_left(corners: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    """Let oriented boxes, whose corners do not tell what is up, begin at the top left of a text in them.

    Their first edge, the longer one, then runs to the right, up or down by at most 45 degrees, or steeper downwards.
    """
    if corners is None:
        return None
    runs_back = (corners[:, 1] - corners[:, 0]).sum(axis=1) <= 0
    return np.where(runs_back[:, None, None], np.roll(corners, 2, axis=1), corners)


def _crop(image: Patch, box: Sequence[float], points: NDArray[np.float32] | None, step: Step) -> Patch | None:
    height, width = image.image.shape[:2]
    left, top, right, bottom = box
    dx, dy = step.margin * (right - left), step.margin * (bottom - top)
    left, top, right, bottom = max(left - dx, 0), max(top - dy, 0), min(right + dx, width), min(bottom + dy, height)
    if not (left < right and top < bottom):  # also if one is not a number
        return None
    if points is None:
        return image._replace(box=(int(left), int(top), math.ceil(right), math.ceil(bottom)))
    if not np.isfinite(points).all():
        return None
    return image._replace(corners=points) if step.crop == "corners" else image._replace(landmarks=points)


def cut_boxes(image: Patch, boxes: Sequence[Sequence[float]]) -> list[Patch]:
    """Return the parts of a decoded image with the pixels that boxes touch, at least one each; boxes are fractions of it."""
    height, width = image.image.shape[:2]
    # Boxes of answers have six digits, which in pixels are two.
    corners = (np.reshape(boxes, (-1, 2, 2)) * [width, height]).round(2)
    first = np.minimum(np.floor(corners[:, 0]), [width - 1, height - 1]).astype(int)
    last = np.maximum(np.ceil(corners[:, 1]), first + 1).astype(int)
    return [image._replace(box=(left, top, right, bottom)) for left, top, right, bottom in np.hstack([first, last]).tolist()]


def place(result: StepResult, part: Patch) -> StepResult:
    """Return what was found in a box of the image, with coordinates in pixels of the whole image."""
    if part.box is None or not isinstance(result, Detections | TextRegions):
        return result
    shift = np.array(part.box[:2], np.float32)
    height, width = part.image.shape[:2]
    if isinstance(result, TextRegions):
        return result._replace(corners=result.corners + shift, width=width, height=height)
    boxes, keypoints = result.boxes + np.tile(shift, 2), result.keypoints
    if keypoints is not None:
        keypoints = keypoints.copy()
        keypoints[..., :2] += shift
    corners = None if result.corners is None else result.corners + shift
    return result._replace(boxes=boxes, keypoints=keypoints, corners=corners, width=width, height=height)
