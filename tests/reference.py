"""An independent way from picture to boxes: OpenCV letterbox, the published network in ONNX Runtime, numpy NMS.

Nothing of app/ is used, so that an error there cannot hide here.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import cv2
import numpy as np
import onnxruntime
from numpy.typing import NDArray

PAD = 114
SCORE = 0.25


class Box(NamedTuple):
    """One detection; corners in pixels of the picture."""

    id: int
    score: float
    corners: tuple[float, float, float, float]


class Reference:
    """One published network with its makers' own pre- and post-processing."""

    def __init__(self, name: str, network: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(network, options, providers=["CPUExecutionProvider"])
        self._is_yolox = name.startswith("yolox")
        self._side = 416 if self._is_yolox else 640
        self._iou = 0.45 if self._is_yolox else 0.7

    def detect(self, file: bytes, least: float = SCORE) -> list[Box]:
        """Find the boxes of at least this score, the best first."""
        picture = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR)
        assert picture is not None
        height, width = picture.shape[:2]
        square, scale, left, top = self._letterbox(picture)
        (head,) = self._session.run(None, {"images": self._tensor(square)})
        boxes, scores = self._decode(np.asarray(head)[0])
        classes = scores.argmax(axis=1)
        best = scores.max(axis=1)
        boxes = (boxes - [left, top, left, top]) / scale
        found = []
        for index in suppress(boxes, best, classes, self._iou, least):
            x1, y1, x2, y2 = np.clip(boxes[index], 0, [width, height, width, height])
            found.append(Box(int(classes[index]), float(best[index]), (x1, y1, x2, y2)))
        return found

    def _letterbox(self, picture: NDArray[Any]) -> tuple[NDArray[np.uint8], float, int, int]:
        height, width = picture.shape[:2]
        scale = min(self._side / width, self._side / height)
        whole = int if self._is_yolox else round
        size = whole(width * scale), whole(height * scale)
        small = cv2.resize(picture, size, interpolation=cv2.INTER_LINEAR) if size != (width, height) else picture
        square = np.full((self._side, self._side, 3), PAD, np.uint8)
        left, top = (0, 0) if self._is_yolox else (round((self._side - side) / 2 - 0.1) for side in size)
        square[top : top + size[1], left : left + size[0]] = small
        return square, scale, left, top

    def _tensor(self, square: NDArray[np.uint8]) -> NDArray[np.float32]:
        """BGR 0..255 for YOLOX, RGB 0..1 for YOLO11: (1, 3, side, side)."""
        planes = square.transpose(2, 0, 1)[None].astype(np.float32)
        return planes if self._is_yolox else np.ascontiguousarray(planes[:, ::-1]) / np.float32(255)

    def _decode(self, head: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Make corners (anchors, 4) in pixels of the square and scores (anchors, classes) of the head."""
        if not self._is_yolox:
            rows = head.T
            centre, size, scores = rows[:, :2], rows[:, 2:4], rows[:, 4:]
        else:
            centre, size = head[:, :2].copy(), np.exp(head[:, 2:4])
            at = 0
            for stride in (8, 16, 32):
                side = self._side // stride
                for y in range(side):
                    for x in range(side):
                        centre[at] = (centre[at] + (x, y)) * stride
                        size[at] *= stride
                        at += 1
            scores = head[:, 5:] * head[:, 4:5]
        return np.concatenate([centre - size / 2, centre + size / 2], axis=1), scores


def iou(a: Sequence[float], b: Sequence[float]) -> float:
    """Intersection over union of two boxes x1 y1 x2 y2."""
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    both = width * height
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def suppress(boxes: NDArray[Any], scores: NDArray[Any], classes: NDArray[Any], overlap: float, least: float) -> list[int]:
    """Non-maximum suppression as in the textbook: the best first, away with what it covers in its class."""
    kept: list[int] = []
    for index in np.argsort(-scores, kind="stable"):
        if scores[index] < least:
            break
        if all(classes[index] != classes[other] or iou(boxes[index], boxes[other]) <= overlap for other in kept):
            kept.append(int(index))
    return kept


class Tally:
    """How well served boxes agree with the reference, over several pictures."""

    def __init__(self, overlap: float = 0.9) -> None:
        """Pair boxes of one class that overlap at least so much."""
        self.overlap = overlap
        self.pictures = self.expected = self.found = self.matched = 0

    def add(self, expected: Sequence[Box], found: Sequence[Box]) -> None:
        """Count the pairs of one picture."""
        self.pictures += 1
        self.expected += len(expected)
        self.found += len(found)
        self.matched += matches(expected, found, self.overlap)

    @property
    def f1(self) -> float:
        """1 where every box has its like."""
        return 2 * self.matched / max(1, self.expected + self.found)

    def __str__(self) -> str:
        counts = f"{self.expected} boxes expected, {self.found} served, {self.matched} matched"
        return f"F1 {self.f1:.4f} on {self.pictures} pictures: {counts}"


QUERY = {"confidence": str(SCORE), "boxes": "pixel", "max_detections": "300"}


def boxes(answer: dict[str, Any]) -> list[Box]:
    """Take the boxes of an answer to `QUERY`."""
    return [Box(d["class_id"], d["confidence"], (d["x1"], d["y1"], d["x2"], d["y2"])) for d in answer["detections"]]


def matches(expected: Sequence[Box], found: Sequence[Box], overlap: float) -> int:
    """Count the pairs of one class that overlap at least so much, each box in one pair at most, the best pairs first."""
    pairs = sorted(
        (
            (iou(one.corners, other.corners), i, j)
            for i, one in enumerate(expected)
            for j, other in enumerate(found)
            if one.id == other.id
        ),
        reverse=True,
    )
    used: tuple[set[int], set[int]] = set(), set()
    for value, i, j in pairs:
        if value >= overlap and i not in used[0] and j not in used[1]:
            used[0].add(i)
            used[1].add(j)
    return len(used[0])
