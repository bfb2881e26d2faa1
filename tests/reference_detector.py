"""The reference detector: OpenCV letterbox, the published network in ONNX Runtime, NMS in plain Python.

It shares no code with app/, so that it does not share its errors.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import cv2
import numpy as np
import onnxruntime
from numpy.typing import NDArray

T = TypeVar("T")
SCORE = 0.25


class Box(NamedTuple):
    """One detection; corners x1 y1 x2 y2 in pixels of the image."""

    id: int
    score: float
    corners: tuple[float, float, float, float]


class ReferenceDetector:
    """A published network with the pre- and post-processing of its authors."""

    def __init__(self, name: str, network: Path) -> None:
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        self._session = onnxruntime.InferenceSession(network, options, providers=["CPUExecutionProvider"])
        self._is_yolox = name.startswith("yolox")
        self._side = 416 if self._is_yolox else 640
        self._iou = 0.45 if self._is_yolox else 0.7

    def detect(self, file: bytes, min_score: float = SCORE) -> list[Box]:
        image = cv2.imdecode(np.frombuffer(file, np.uint8), cv2.IMREAD_COLOR)
        if image is None:
            raise ValueError("OpenCV cannot decode the image")
        height, width = image.shape[:2]
        canvas, scale, left, top = self._letterbox(image)
        (head,) = self._session.run(None, {"images": self._to_tensor(canvas)})
        boxes, scores = self._decode(np.asarray(head)[0])
        classes = scores.argmax(axis=1)
        best = scores.max(axis=1)
        boxes = (boxes - [left, top, left, top]) / scale
        found = []
        for index in suppress(boxes, best, classes, self._iou, min_score):
            x1, y1, x2, y2 = np.clip(boxes[index], 0, [width, height, width, height])
            found.append(Box(int(classes[index]), float(best[index]), (x1, y1, x2, y2)))
        return found

    def _letterbox(self, image: NDArray[Any]) -> tuple[NDArray[np.uint8], float, int, int]:
        """Fit an image to the canvas; return the canvas, the scale, and the position of the image's top left corner."""
        height, width = image.shape[:2]
        scale = min(self._side / width, self._side / height)
        to_pixels = int if self._is_yolox else round
        size = to_pixels(width * scale), to_pixels(height * scale)
        resized = cv2.resize(image, size, interpolation=cv2.INTER_LINEAR) if size != (width, height) else image
        # One side is 640: the canvas of YOLO11 is a square, or of 4:3, 3:2 or 16:9.
        sides = [416, 416] if self._is_yolox else [min(each for each in (384, 448, 480, 640) if each >= side) for side in size]
        canvas = np.full((sides[1], sides[0], 3), 114, np.uint8)
        left, top = (0, 0) if self._is_yolox else (round((own - side) / 2 - 0.1) for own, side in zip(sides, size, strict=True))
        canvas[top : top + size[1], left : left + size[0]] = resized
        return canvas, scale, left, top

    def _to_tensor(self, canvas: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Convert a BGR canvas to FP32 (1, 3, side, side): BGR 0 to 255 for YOLOX, RGB 0 to 1 for YOLO11."""
        planes = canvas.transpose(2, 0, 1)[None].astype(np.float32)
        return planes if self._is_yolox else np.ascontiguousarray(planes[:, ::-1]) / np.float32(255)

    def _decode(self, head: NDArray[Any]) -> tuple[NDArray[Any], NDArray[Any]]:
        """Convert the head to corners (anchors, 4) in pixels of the canvas and scores (anchors, classes)."""
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
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    if width <= 0 or height <= 0:
        return 0.0
    both = width * height
    return both / ((a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - both)


def overlap_of(one: Box, other: Box) -> float:
    return iou(one.corners, other.corners) if one.id == other.id else 0.0


def suppress(boxes: NDArray[Any], scores: NDArray[Any], classes: NDArray[Any], overlap: float, min_score: float) -> list[int]:
    """Run textbook non-maximum suppression: keep the best box, drop those of its class that it overlaps, and so on."""
    kept: list[int] = []
    for index in np.argsort(-scores, kind="stable"):
        if scores[index] < min_score:
            break
        if all(classes[index] != classes[other] or iou(boxes[index], boxes[other]) <= overlap for other in kept):
            kept.append(int(index))
    return kept


class MatchCounts:
    """Agreement of served boxes with the reference, over several images."""

    def __init__(self, overlap: float = 0.9) -> None:
        self.overlap = overlap
        self.images = self.expected = self.found = self.matched = 0

    def add(self, expected: Sequence[Box], found: Sequence[Box]) -> None:
        self.images += 1
        self.expected += len(expected)
        self.found += len(found)
        self.matched += len([*pair(expected, found, overlap_of, self.overlap)])

    @property
    def f1(self) -> float:
        return 2 * self.matched / max(1, self.expected + self.found)

    def __str__(self) -> str:
        counts = f"{self.expected} boxes expected, {self.found} served, {self.matched} matched"
        return f"F1 {self.f1:.4f} on {self.images} images: {counts}"


QUERY = {"confidence": str(SCORE), "boxes": "pixel", "max_detections": "300"}
"""Parameters of a request for comparison with the reference."""


def boxes(answer: dict[str, Any]) -> list[Box]:
    return [Box(d["class_id"], d["confidence"], (d["x1"], d["y1"], d["x2"], d["y2"])) for d in answer["detections"]]


def pair(expected: Sequence[T], found: Sequence[T], overlap: Callable[[T, T], float], least: float) -> Iterator[tuple[T, T]]:
    """Pair what overlaps by at least `least`, best pairs first, each in at most one pair."""
    overlaps = [(overlap(one, other), i, j) for i, one in enumerate(expected) for j, other in enumerate(found)]
    left = set(range(len(expected))), set(range(len(found)))
    for value, i, j in sorted(overlaps, reverse=True):
        if value >= least and i in left[0] and j in left[1]:
            left[0].remove(i)
            left[1].remove(j)
            yield expected[i], found[j]
