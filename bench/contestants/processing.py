"""Pre- and post-processing as is common in Python services: stock Pillow, then numpy."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

OUTPUTS = ("num_dets", "det_boxes", "det_scores", "det_classes")
"""Outputs of a detector: number of rows (1, 1); boxes (1, n, 4) x1 y1 x2 y2 in pixels of the canvas; scores (1, n), descending;
class ids (1, n)."""

_SIDE = 640
_PAD = 114
_MIN_CONFIDENCE = 0.25


class Letterboxed(NamedTuple):
    """An image on a canvas, and its position."""

    canvas: NDArray[np.uint8]
    """Shape (640, 640, 3), RGB."""
    scale: float
    left: int
    top: int
    width: int
    """Width of the original image, in pixels."""
    height: int
    """Height of the original image, in pixels."""


def letterbox(data: bytes) -> Letterboxed:
    """Decode an image and fit it to the centre of a canvas."""
    image = Image.open(BytesIO(data)).convert("RGB")
    width, height = image.size
    scale = min(_SIDE / width, _SIDE / height)
    inner = round(width * scale), round(height * scale)
    left, top = (_SIDE - inner[0]) // 2, (_SIDE - inner[1]) // 2
    canvas = np.full((_SIDE, _SIDE, 3), _PAD, np.uint8)
    canvas[top : top + inner[1], left : left + inner[0]] = np.asarray(image.resize(inner, Image.Resampling.BILINEAR))
    return Letterboxed(canvas, scale, left, top, width, height)


def normalize(canvas: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Convert a canvas to FP32 (1, 3, 640, 640), 0 to 1."""
    planes = (canvas.astype(np.float32) / 255.0).transpose(2, 0, 1)
    return np.ascontiguousarray(planes)[None]


def describe(image: Letterboxed, labels: list[str], tensors: Sequence[NDArray[Any]]) -> dict[str, Any]:
    """Build the response of a server from `OUTPUTS`: detections with corners as fractions of the image, and its size."""
    count, boxes, scores, classes = tensors
    detections: list[dict[str, Any]] = []
    for row in range(int(count[0, 0])):
        confidence = float(scores[0, row])
        if confidence < _MIN_CONFIDENCE:
            break
        x1, y1, x2, y2 = (float(value) for value in boxes[0, row])
        id_ = int(classes[0, row])
        detections.append(
            {
                "x1": min(max((x1 - image.left) / image.scale / image.width, 0.0), 1.0),
                "y1": min(max((y1 - image.top) / image.scale / image.height, 0.0), 1.0),
                "x2": min(max((x2 - image.left) / image.scale / image.width, 0.0), 1.0),
                "y2": min(max((y2 - image.top) / image.scale / image.height, 0.0), 1.0),
                "confidence": confidence,
                "class": id_,
                "class_id": id_,
                "class_name": labels[id_],
            }
        )
    size = {"width": image.width, "height": image.height}
    return {"detections": detections, "num_detections": len(detections), "status": "success", "image": size}
