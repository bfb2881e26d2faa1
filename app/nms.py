"""Raw detector heads -> boxes, in numpy, for models that do not bring their own post-processing.

The same choices as in the graphs that `compose` builds: an anchor stands for its best class, boxes
of different classes never suppress each other, candidates are bounded before the quadratic step.
"""

import numpy as np
from numpy.typing import NDArray

MAX_CANDIDATES = 1000
MAX_DETECTIONS = 300
# Low, because the caller's own threshold is applied per request; it can only be higher.
SCORE_FLOOR = 0.05
STRIDES = (8, 16, 32)

Boxes = NDArray[np.float32]
Scores = NDArray[np.float32]
Classes = NDArray[np.int32]


def cells(frame: tuple[int, int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Lay out the anchors of a grid head over a frame of width x height pixels.

    Returns:
        Cell corners (anchors, 2) x y in cells and strides (anchors, 1) in pixels.
    """
    corners, strides = [], []
    for stride in STRIDES:
        y, x = np.indices((frame[1] // stride, frame[0] // stride), dtype=np.float32)
        corners.append(np.stack([x.ravel(), y.ravel()], axis=1))
        strides.append(np.full((x.size, 1), stride, np.float32))
    return np.concatenate(corners), np.concatenate(strides)


def from_yolo(head: NDArray[np.float32], iou: float) -> tuple[Boxes, Scores, Classes]:
    """Take a head (4 + classes, anchors): box centre and size in pixels of the frame, final scores."""
    return _select(head[:4].T, head[4:].T, iou)


def from_yolox(head: NDArray[np.float32], iou: float, frame: tuple[int, int]) -> tuple[Boxes, Scores, Classes]:
    """Take a head (anchors, 5 + classes): offsets and log sizes in cells, objectness, class scores."""
    corners, strides = cells(frame)
    centres = (head[:, :2] + corners) * strides
    sizes = np.exp(head[:, 2:4]) * strides
    return _select(np.concatenate([centres, sizes], axis=1), head[:, 4:5] * head[:, 5:], iou)


def _select(boxes: Boxes, scores: Scores, iou: float) -> tuple[Boxes, Scores, Classes]:
    """Keep at most `MAX_DETECTIONS` of boxes (anchors, 4) centre x y width height by scores (anchors, classes).

    Returns:
        (n, 4) x1 y1 x2 y2, (n,) falling, (n,).
    """
    winners = scores.argmax(axis=1)
    best = scores[np.arange(len(scores)), winners]
    order = np.argsort(-best, kind="stable")[:MAX_CANDIDATES]
    order = order[best[order] > SCORE_FLOOR]
    centres, half = boxes[order, :2], boxes[order, 2:] / 2
    corners = np.concatenate([centres - half, centres + half], axis=1)
    best, classes = best[order], winners[order].astype(np.int32)
    kept = _suppress(corners, classes, iou)[:MAX_DETECTIONS]
    return corners[kept], best[kept], classes[kept]


def _suppress(corners: Boxes, classes: Classes, iou: float) -> NDArray[np.intp]:
    """Choose, from boxes sorted by falling score, those that no better one of their class covers."""
    x1, y1, x2, y2 = corners.T
    area = (x2 - x1) * (y2 - y1)
    kept = []
    waiting = np.arange(len(corners))
    while len(waiting):
        first, rest = waiting[0], waiting[1:]
        kept.append(first)
        width = np.minimum(x2[first], x2[rest]) - np.maximum(x1[first], x1[rest])
        height = np.minimum(y2[first], y2[rest]) - np.maximum(y1[first], y1[rest])
        overlap = np.maximum(width, 0) * np.maximum(height, 0)
        union = area[first] + area[rest] - overlap
        waiting = rest[(classes[rest] != classes[first]) | (overlap <= iou * union)]
    return np.array(kept, np.intp)
