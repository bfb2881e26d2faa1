"""Small pictures of an image, or of a part of it."""

from collections.abc import Sequence

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

_QUALITY = 80


def to_thumbnail(pixels: NDArray[np.uint8], side: int, box: Sequence[float] = (0, 0, 1, 1)) -> bytes:
    """Return a JPEG of a box, x1 y1 x2 y2 as fractions, of (height, width, 3) RGB pixels; its longer side is at most `side`."""
    height, width = pixels.shape[:2]
    left, top = min(round(box[0] * width), width - 1), min(round(box[1] * height), height - 1)
    part = pixels[top : max(top + 1, round(box[3] * height)), left : max(left + 1, round(box[2] * width))]
    scale = side / max(part.shape[:2])
    if scale < 1:
        size = max(1, round(part.shape[1] * scale)), max(1, round(part.shape[0] * scale))
        part = cv2.resize(part, size, interpolation=cv2.INTER_AREA)  # type: ignore[assignment]
    encoded: bytes = simplejpeg.encode_jpeg(np.ascontiguousarray(part), quality=_QUALITY, colorspace="RGB")
    return encoded
