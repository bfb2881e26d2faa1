"""Bytes -> the model's square and back, the way Python services commonly do it: stock Pillow, then numpy."""

from collections.abc import Sequence
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

SIDE = 640
_PAD = 114
_LEAST_CONFIDENCE = 0.25


class Fitted(NamedTuple):
    """A picture in the square, and how it came to lie there."""

    square: NDArray[np.uint8]
    scale: float
    left: int
    top: int
    width: int
    """Of the picture as sent, pixels."""
    height: int
    """Of the picture as sent, pixels."""


def letterboxed(data: bytes) -> Fitted:
    """Decode a picture and fit it into the middle of the square."""
    picture = Image.open(BytesIO(data)).convert("RGB")
    width, height = picture.size
    scale = min(SIDE / width, SIDE / height)
    inner = round(width * scale), round(height * scale)
    left, top = (SIDE - inner[0]) // 2, (SIDE - inner[1]) // 2
    square = np.full((SIDE, SIDE, 3), _PAD, np.uint8)
    square[top : top + inner[1], left : left + inner[0]] = np.asarray(picture.resize(inner, Image.Resampling.BILINEAR))
    return Fitted(square, scale, left, top, width, height)


def normalized(square: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Turn the square into FP32 (1, 3, 640, 640), 0 to 1."""
    planes = (square.astype(np.float32) / 255.0).transpose(2, 0, 1)
    return np.ascontiguousarray(planes)[None]


def named(
    fitted: Fitted,
    labels: list[str],
    tensors: Sequence[NDArray[Any]],
) -> list[dict[str, Any]]:
    """List the detections of a batch of one, corners as fractions of the picture.

    Args:
        fitted: The picture.
        labels: Names by class id.
        tensors: Valid rows (1, 1); boxes (1, n, 4) x1 y1 x2 y2 in pixels of the square; scores (1, n), descending;
            class ids (1, n).
    """
    count, boxes, scores, classes = tensors
    found = []
    for row in range(int(count[0, 0])):
        confidence = float(scores[0, row])
        if confidence < _LEAST_CONFIDENCE:
            break
        x1, y1, x2, y2 = (float(value) for value in boxes[0, row])
        id_ = int(classes[0, row])
        found.append(
            {
                "x1": min(max((x1 - fitted.left) / fitted.scale / fitted.width, 0.0), 1.0),
                "y1": min(max((y1 - fitted.top) / fitted.scale / fitted.height, 0.0), 1.0),
                "x2": min(max((x2 - fitted.left) / fitted.scale / fitted.width, 0.0), 1.0),
                "y2": min(max((y2 - fitted.top) / fitted.scale / fitted.height, 0.0), 1.0),
                "confidence": confidence,
                "class": id_,
                "class_id": id_,
                "class_name": labels[id_],
            }
        )
    return found
