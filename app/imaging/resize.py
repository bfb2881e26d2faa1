"""Resize pixels."""

import math
from typing import Literal, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

# The decoding threads already use all cores; more threads inside OpenCV would only compete for them.
cv2.setNumThreads(1)

Interpolation = Literal["bilinear", "bicubic"]

_METHODS: dict[Interpolation, int] = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
_FILTERS: dict[Interpolation, Image.Resampling] = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
# How far they reach from the middle of a pixel, in pixels of the result when it shrinks.
_REACHES: dict[Interpolation, int] = {"bilinear": 1, "bicubic": 2}
_PILLOW_BYTES = 4


class Span(NamedTuple):
    """A part of an axis, in pixels, which may begin and end within one."""

    start: float
    end: float


def resize_into(pixels: NDArray[np.uint8], area: NDArray[np.uint8], interpolation: Interpolation) -> None:
    """Resize an image into an area of a canvas.

    The interpolation is between the four nearest pixels, or the sixteen nearest, as in the training of most detectors;
    `resample_into` averages when it shrinks, which changes scores and boxes.

    Args:
        pixels: UINT8 (height, width, 3) RGB; it may be that area already.
        area: UINT8 (height, width, 3) RGB; every byte of it is written.
        interpolation: Between which pixels.
    """
    if np.may_share_memory(pixels, area):
        return
    if pixels.shape == area.shape:
        area[:] = pixels
    else:
        cv2.resize(pixels, area.shape[1::-1], dst=area, interpolation=_METHODS[interpolation])


def resample_into(
    pixels: NDArray[np.uint8], columns: Span, rows: Span, canvas: NDArray[np.uint8], interpolation: Interpolation
) -> None:
    """Resize a part of an image with a filter that covers all pixels that become one, as in the training of most classifiers.

    The result is that of resizing the whole image and cutting it then.

    Args:
        pixels: UINT8 (height, width, 3) RGB, in one piece of memory.
        columns: Which part.
        rows: Which part.
        canvas: UINT8 (height, width, 3) RGB; every byte of it is written.
        interpolation: The filter.
    """
    height, width = canvas.shape[:2]
    left, right = _covered(columns, pixels.shape[1], width, interpolation)
    top, bottom = _covered(rows, pixels.shape[0], height, interpolation)
    # Pillow copies what it resizes, and needs no other copy if it is told how long the rows are.
    data = pixels[top:bottom].reshape(-1)[3 * left :]
    part = Image.frombuffer("RGB", (right - left, bottom - top), data, "raw", "RGB", pixels.strides[0], 1)
    box = columns.start - left, rows.start - top, columns.end - left, rows.end - top
    canvas[:] = np.asarray(part.resize((width, height), _FILTERS[interpolation], box))


def resample_bytes(
    size: tuple[int, int], columns: Span, rows: Span, canvas_size: tuple[int, int], interpolation: Interpolation
) -> int:
    """Return how much memory `resample_into` takes, bytes, but for some copies of the canvas.

    Args:
        size: Width and height of the image, pixels.
        columns: Which part is resized.
        rows: Which part is resized.
        canvas_size: Width and height, pixels.
        interpolation: The filter.
    """
    left, right = _covered(columns, size[0], canvas_size[0], interpolation)
    top, bottom = _covered(rows, size[1], canvas_size[1], interpolation)
    # Pillow resizes each row, and then each column.
    return (bottom - top) * (right - left + canvas_size[0]) * _PILLOW_BYTES


def _covered(span: Span, size: int, target: int, interpolation: Interpolation) -> tuple[int, int]:
    """Return start and end of the pixels of an axis that the filter covers."""
    reach = _REACHES[interpolation] * max(1.0, (span.end - span.start) / target) + 1
    return max(0, math.floor(span.start - reach)), min(size, math.ceil(span.end + reach))
