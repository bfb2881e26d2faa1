"""Compare the answers of two models to the same question about an image."""

from collections import Counter
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.imaging.drawing import Marks
from app.pipeline.results import Detections, Embedding, TaskResult

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
    first class; a vector as one around the image, too, of which the cosine with the other vector is the IoU.
    """
    given, other = boxes_of(first), boxes_of(second)
    labels, other_labels = (np.array(each.names, np.str_) for each in (given, other))
    ious = np.where(labels[:, None] == other_labels[None], _iou(given.boxes, other.boxes), 0)
    if isinstance(first, Embedding) and isinstance(second, Embedding):
        ious *= first.vector @ second.vector if first.vector.size == second.vector.size else 0
    found = Comparison([], Counter(given.names), Counter(other.names))
    while ious.size and ious.max() >= _MIN_IOU:
        row, column = np.unravel_index(ious.argmax(), ious.shape)
        label = str(labels[row])
        found.matches.append(Match(label, float(ious[row, column]), (float(given.scores[row]), float(other.scores[column]))))
        ious[row], ious[:, column] = 0, 0
        found.missing[label] -= 1
        found.additional[label] -= 1
    return found._replace(missing=+found.missing, additional=+found.additional)


def boxes_of(found: TaskResult) -> Marks:
    """Return the boxes of an answer; of a classification, one around the image for its first class, or for a vector."""
    image = np.array([[0, 0, found.width, found.height]], np.float32)
    if isinstance(found, Embedding):
        return Marks(image, np.ones(1, np.float32), np.zeros(1, np.int32), ["embedding"])
    names = [found.spec.class_name(id_) for id_ in found.class_ids.tolist()]
    if isinstance(found, Detections):
        return Marks(found.boxes, found.scores, found.class_ids, names)
    return Marks(image[: len(names)], found.scores[:1], found.class_ids[:1], names[:1])


def _iou(boxes: NDArray[np.float32], others: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the IoU (n, m) of boxes (n, 4) and others (m, 4); that of boxes without area is 0."""
    one, other = boxes[:, None], others[None]
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    overlap = np.maximum(sides, 0).prod(axis=2)
    areas, other_areas = ((each[..., 2:] - each[..., :2]).prod(axis=2) for each in (one, other))
    ious: NDArray[np.float32] = np.divide(overlap, areas + other_areas - overlap, out=np.zeros_like(overlap), where=overlap > 0)
    return ious
