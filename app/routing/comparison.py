"""Compare the answers of two models to the same question about an image."""

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.pipeline.call import Detections, TaskResult

_MIN_IOU = 0.5


class Match(NamedTuple):
    """A box in both answers: its class, the intersection over union (0.5 to 1) and both scores (0 to 1)."""

    label: str
    iou: float
    scores: tuple[float, float]


class Comparison(NamedTuple):
    """The boxes that two answers have in common, and by class the numbers of those that only the first or the second one has."""

    matches: list[Match]
    missing: Counter[str]
    additional: Counter[str]

    @property
    def agreement(self) -> float:
        """Share of the boxes of either answer that both have, 0 to 1; 1 if there are none."""
        total = len(self.matches) + self.missing.total() + self.additional.total()
        return len(self.matches) / total if total else 1.0


def compare(first: TaskResult, second: TaskResult) -> Comparison:
    """Match the boxes of two answers one to one, the best IoU first; boxes match only if their classes have the same name.

    Poses and oriented boxes are compared by the boxes around them. A classification counts as one box around the image, of its
    first class.
    """
    (boxes, scores, labels), (other_boxes, other_scores, other_labels) = boxes_of(first), boxes_of(second)
    ious = np.where(labels[:, None] == other_labels[None], _iou(boxes, other_boxes), 0)
    matches: list[Match] = []
    missing, additional = Counter(labels.tolist()), Counter(other_labels.tolist())
    while ious.size and ious.max() >= _MIN_IOU:
        one, other = np.unravel_index(ious.argmax(), ious.shape)
        label = str(labels[one])
        matches.append(Match(label, float(ious[one, other]), (float(scores[one]), float(other_scores[other]))))
        ious[one], ious[:, other] = 0, 0
        missing[label] -= 1
        additional[label] -= 1
    return Comparison(matches, +missing, +additional)


def boxes_of(found: TaskResult) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.str_]]:
    """Return boxes (n, 4) x1 y1 x2 y2, scores (n,) and names of classes (n,); of a classification, those of its first class."""
    labels = np.array([found.spec.class_name(id_) for id_ in found.class_ids.tolist()], np.str_)
    if isinstance(found, Detections):
        return found.boxes, found.scores, labels
    image = np.array([[0, 0, found.width, found.height]], np.float32)
    return image[: len(labels)], found.scores[:1], labels[:1]


def _iou(boxes: NDArray[np.float32], others: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the IoU (n, m) of boxes (n, 4) and others (m, 4); that of boxes without area is 0."""
    one, other = boxes[:, None], others[None]
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    overlap = np.maximum(sides, 0).prod(axis=2)
    areas, other_areas = ((each[..., 2:] - each[..., :2]).prod(axis=2) for each in (one, other))
    ious: NDArray[np.float32] = np.divide(overlap, areas + other_areas - overlap, out=np.zeros_like(overlap), where=overlap > 0)
    return ious
