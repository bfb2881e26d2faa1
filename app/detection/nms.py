"""Decode raw detector heads to boxes, and suppress duplicate boxes, in numpy.

The rules are those of the graphs that `pull` composes: an anchor counts only for its best class, boxes of different classes do not
suppress each other by default, and the number of candidates is limited before the quadratic step.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.model.anchors import anchor_grid

MAX_CANDIDATES = 1000
MAX_DETECTIONS = 300
# Low, because each request applies its own threshold afterwards.
MIN_SCORE = 0.05


class Candidates(NamedTuple):
    """The unordered candidates of one image; those of a raw head include duplicates."""

    boxes: NDArray[np.float32]
    """Shape (n, 4) x1 y1 x2 y2, in pixels of the model's input or of the image."""
    scores: NDArray[np.float32]
    """Shape (n,), 0 to 1."""
    class_ids: NDArray[np.int32]
    """Shape (n,)."""
    features: NDArray[np.float32] | None = None
    """Shape (n, features) as the model's head says; None without features."""

    def take(self, indices: NDArray[np.intp]) -> "Candidates":
        """Return the candidates with these indices (m,)."""
        features = None if self.features is None else self.features[indices]
        return Candidates(self.boxes[indices], self.scores[indices], self.class_ids[indices], features)


def from_yolo(head: NDArray[np.float32], floor: float = MIN_SCORE, features: int = 0) -> Candidates:
    """Decode a head (4 + classes + features, anchors): centre and size of the box in pixels of the input, then final scores."""
    end = len(head) - features
    return _candidates(head[:4].T, head[4:end].T, floor, head[end:].T if features else None)


def from_yolov5(head: NDArray[np.float32], floor: float = MIN_SCORE) -> Candidates:
    """Decode a head (rows, 5 + classes): centre and size of the box in pixels of the input, objectness, then class scores."""
    head = head[head[:, 4] > floor]  # as no class score is above one
    return _candidates(head[:, :4], head[:, 4:5] * head[:, 5:], floor)


def from_yolox(head: NDArray[np.float32], input_size: tuple[int, int], floor: float = MIN_SCORE) -> Candidates:
    """Decode a head (anchors, 5 + classes): offset and log size in cells, objectness, then class scores."""
    corners, strides = anchor_grid(input_size)
    centres = (head[:, :2] + corners) * strides
    sizes = np.exp(head[:, 2:4]) * strides
    return _candidates(np.concatenate([centres, sizes], axis=1), head[:, 4:5] * head[:, 5:], floor)


def _candidates(
    boxes: NDArray[np.float32], scores: NDArray[np.float32], floor: float, features: NDArray[np.float32] | None = None
) -> Candidates:
    """Keep the best `MAX_CANDIDATES` above `floor` of boxes (anchors, 4) centre x y width height by scores (anchors, classes)."""
    winners = scores.argmax(axis=1)
    best = scores[np.arange(len(scores)), winners]
    order = np.argsort(-best, kind="stable")[:MAX_CANDIDATES]
    order = order[best[order] > floor]
    return Candidates(
        to_corners(boxes[order]), best[order], winners[order].astype(np.int32), None if features is None else features[order]
    )


def to_corners(boxes: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return x1 y1 x2 y2 of boxes (n, 4) given by centre and size."""
    centres, half = boxes[:, :2], boxes[:, 2:] / 2
    return np.concatenate([centres - half, centres + half], axis=1)


def suppress(found: Candidates, classes: NDArray[np.int32] | None, iou: float) -> NDArray[np.intp]:
    """Choose the boxes that no better box suppresses, at most `MAX_DETECTIONS`, and return their indices, ascending.

    The candidates are by descending score. A box goes if its intersection over union with a better one is above `iou`. `classes` is
    (n,), None if boxes of different classes also suppress each other.
    """
    x1, y1, x2, y2 = found.boxes.T
    area = (x2 - x1) * (y2 - y1)
    kept: list[np.intp] = []
    remaining = np.arange(len(found.boxes))
    while len(remaining) and len(kept) < MAX_DETECTIONS:
        first, rest = remaining[0], remaining[1:]
        kept.append(first)
        width = np.minimum(x2[first], x2[rest]) - np.maximum(x1[first], x1[rest])
        height = np.minimum(y2[first], y2[rest]) - np.maximum(y1[first], y1[rest])
        overlap = np.maximum(width, 0) * np.maximum(height, 0)
        union = area[first] + area[rest] - overlap
        is_free = overlap <= iou * union
        if classes is not None:
            is_free |= classes[rest] != classes[first]
        remaining = rest[is_free]
    return np.array(kept, np.intp)
