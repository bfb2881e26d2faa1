"""The objects that a step has found, and the parts of the image that a later step is asked about."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.cascade.definition import Step
from app.detection.select import to_class_ids
from app.errors import UnsupportedModel
from app.imaging.patch import Patch
from app.model.spec import ModelSpec
from app.obb.boxes import enclose
from app.pipeline.results import Detections, StepResult, TextRegions


class Objects(NamedTuple):
    """The objects in all results of a step, one after the other; coordinates in pixels of the image."""

    boxes: NDArray[np.float32]
    """(n, 4) x1 y1 x2 y2."""
    scores: NDArray[np.float32]
    """(n,)."""
    is_wanted: NDArray[np.bool_]
    """(n,): whether it has one of the classes of the later step."""
    points: NDArray[np.float32] | None
    """(n, points, 2): corners or landmarks, as the later step needs them; None for boxes."""

    @property
    def sizes(self) -> NDArray[np.float32]:
        """(n,) areas of the boxes."""
        sizes: NDArray[np.float32] = (self.boxes[:, 2:] - self.boxes[:, :2]).prod(axis=1)
        return sizes


def find_objects(results: Sequence[StepResult], step: Step, spec: ModelSpec) -> Objects:
    """Return the objects in what a step has answered, for a later step and its model.

    Raises:
        UnsupportedModel: There are no objects, or not with what the later step needs of them.
        InvalidParameter: The classes of the later step are unknown.
    """
    found = [_read(result, step, spec) for result in results]
    if not found:
        nothing = np.empty(0, np.float32)
        return Objects(nothing.reshape(0, 4), nothing, nothing.astype(bool), None)
    boxes, scores, is_wanted, points = zip(*found, strict=True)
    return Objects(
        np.concatenate(boxes),
        np.concatenate(scores),
        np.concatenate(is_wanted),
        None if step.crop == "box" else np.concatenate(points),
    )


def _read(result: StepResult, step: Step, spec: ModelSpec) -> Objects:
    if not isinstance(result, Detections | TextRegions):
        raise UnsupportedModel(f"{result.spec.name} finds no objects that {spec.name} can be asked about")
    class_ids = result.class_ids if isinstance(result, Detections) else np.zeros(len(result.scores), np.int32)
    wanted = to_class_ids(step.classes or None, result.spec.labels)
    is_wanted = np.isin(class_ids, list(wanted)) if wanted is not None else np.ones(len(class_ids), bool)
    boxes = result.boxes if isinstance(result, Detections) else enclose(result.corners)
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
    return Objects(boxes, result.scores, is_wanted, points)


def _from_top_left(corners: NDArray[np.float32] | None) -> NDArray[np.float32] | None:
    """Let oriented boxes, whose corners do not tell what is up, begin at the top left of a text in them.

    Their first edge, the longer one, then runs to the right, up or down by at most 45 degrees, or steeper downwards, as a line of
    text that is cut out.
    """
    if corners is None:
        return None
    runs_back = (corners[:, 1] - corners[:, 0]).sum(axis=1) <= 0
    return np.where(runs_back[:, None, None], np.roll(corners, 2, axis=1), corners)


def crop(image: Patch, objects: Objects, index: int, step: Step) -> Patch | None:
    """Return the part of a decoded image with an object; None if it is empty."""
    height, width = image.image.shape[:2]
    left, top, right, bottom = objects.boxes[index].tolist()
    dx, dy = step.margin * (right - left), step.margin * (bottom - top)
    left, top, right, bottom = max(left - dx, 0), max(top - dy, 0), min(right + dx, width), min(bottom + dy, height)
    if not (left < right and top < bottom):  # also if one is not a number
        return None
    if objects.points is None:
        return image._replace(box=(int(left), int(top), math.ceil(right), math.ceil(bottom)))
    points = objects.points[index]
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
