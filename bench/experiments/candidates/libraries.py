"""Plain image libraries."""

from io import BytesIO
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from bench.experiments.candidates.registry import Step

_SIDE = 640
_PAD = 114
Pixels = NDArray[Any]


def opencv_steps() -> dict[str, Step]:
    """OpenCV for everything."""
    cv2.setNumThreads(1)

    return {
        "decode": lambda data: cv2.imdecode(np.frombuffer(data, np.uint8), cv2.IMREAD_COLOR_RGB),
        "letterbox": _resize,
    }


def pillow_steps() -> dict[str, Step]:
    """Pillow in this environment (pillow-simd in Nereid's), with its affine transform as the resize."""

    def letterbox(image: Image.Image) -> Pixels:
        scale = min(_SIDE / image.width, _SIDE / image.height)
        size = round(image.width * scale), round(image.height * scale)
        canvas = np.full((_SIDE, _SIDE, 3), _PAD, np.uint8)
        coefficients = (1 / scale, 0, 0, 0, 1 / scale, 0)
        if size != image.size:
            image = image.transform(size, Image.Transform.AFFINE, coefficients, Image.Resampling.BILINEAR)
        left, top = (_SIDE - size[0]) // 2, (_SIDE - size[1]) // 2
        canvas[top : top + size[1], left : left + size[0]] = np.asarray(image)
        return canvas

    return {
        "header": lambda data: Image.open(BytesIO(data)),
        "decode": lambda image: image.convert("RGB"),
        "letterbox": letterbox,
    }


def _resize(pixels: Pixels) -> Pixels:
    """Fit pixels to a canvas with OpenCV."""
    height, width = pixels.shape[:2]
    scale = min(_SIDE / width, _SIDE / height)
    size = round(width * scale), round(height * scale)
    canvas = np.full((_SIDE, _SIDE, 3), _PAD, np.uint8)
    left, top = (_SIDE - size[0]) // 2, (_SIDE - size[1]) // 2
    cv2.resize(pixels, size, dst=canvas[top : top + size[1], left : left + size[0]])
    return canvas
