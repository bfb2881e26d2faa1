"""Resize pixels."""

from typing import Literal

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

# The decoding threads already use all cores; more threads inside OpenCV would only compete for them.
cv2.setNumThreads(1)

Interpolation = Literal["bilinear", "bicubic"]

_METHODS: dict[Interpolation, int] = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
_FILTERS: dict[Interpolation, Image.Resampling] = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}


def resize_into(pixels: NDArray[np.uint8], area: NDArray[np.uint8], interpolation: Interpolation) -> None:
    """Resize an image into an area of a canvas.

    The interpolation is between the four nearest pixels, or the sixteen nearest, as in the training of most detectors;
    `resample` averages when it shrinks, which changes scores and boxes.

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


def resample(pixels: NDArray[np.uint8], size: tuple[int, int], interpolation: Interpolation) -> NDArray[np.uint8]:
    """Resize an image with a filter that covers all pixels that become one, as in the training of most classifiers.

    Args:
        pixels: UINT8 (height, width, 3) RGB.
        size: Width and height, pixels.
        interpolation: The filter.

    Returns:
        UINT8 (height, width, 3) RGB of that size.
    """
    return np.asarray(Image.fromarray(np.ascontiguousarray(pixels)).resize(size, _FILTERS[interpolation]))
