"""Resize pixels."""

from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray

# The decoding threads already use all cores; more threads inside OpenCV would only compete for them.
cv2.setNumThreads(1)

Interpolation = Literal["bilinear", "bicubic"]

_METHODS: dict[Interpolation, int] = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}


def resize_into(pixels: NDArray[np.uint8], area: NDArray[np.uint8], interpolation: Interpolation) -> None:
    """Resize an image into an area of a canvas.

    The interpolation is between the four nearest pixels, or the sixteen nearest, as in the training of most models; Pillow's
    `resize` averages when it shrinks, which changes scores and boxes.

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
