"""AVIF and TIFF by OpenCV, from files that are written anew with nothing but what was checked.

pillow-simd comes without libavif and libtiff, and the OpenCV that resizes has both.
"""

from collections.abc import Callable
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from app.errors import InvalidImage
from app.imaging import avif, tiff

# It writes of oddities of a caller's image to stderr, which are reported to the caller, if at all.
_SILENT = 0
# OpenCV 4, which the embedded Triton's models have up to Python 3.12, has it elsewhere.
(getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel)(_SILENT)

# Memory at the peak, bytes a pixel: the planes of AV1, of up to 16 bits, several times; libtiff's and OpenCV's copies.
PIXEL_BYTES = {"AVIF": 32, "TIFF": 16}
FORMATS = frozenset(PIXEL_BYTES)


class OpenCvFile(NamedTuple):
    """An image of which only the header has been read."""

    width: int
    """Pixels, as stored."""
    height: int
    """Pixels, as stored."""
    orientation: int
    """As in EXIF, 1 to 8."""
    pixel_bytes: int
    """Memory that decoding takes at its peak, bytes a pixel, beside two copies of the file."""
    rewrite: Callable[[], bytes]
    """Makes the file that OpenCV is to read."""


def open_file(data: bytes, name: str) -> OpenCvFile:
    """Read the header of an AVIF or TIFF.

    Raises:
        UnsupportedFormat: It is of a kind that is not read.
        InvalidImage: It is broken.
    """
    if name == "AVIF":
        boxes = avif.read_header(data)
        return OpenCvFile(*boxes[:3], PIXEL_BYTES[name], lambda: avif.rewrite(data, boxes))
    tags = tiff.read_header(data)
    return OpenCvFile(*tags[:3], PIXEL_BYTES[name], lambda: tiff.rewrite(data, tags))


def decode(file: OpenCvFile) -> NDArray[np.uint8]:
    """Decode to UINT8 (height, width, 3) RGB, as stored.

    Raises:
        InvalidImage: The data is truncated or corrupt.
    """
    try:
        pixels = cv2.imdecode(np.frombuffer(file.rewrite(), np.uint8), cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise InvalidImage("the image data is truncated or corrupt") from error
    if pixels is None or pixels.shape != (file.height, file.width, 3):
        raise InvalidImage("the image data is truncated or corrupt")
    return np.asarray(pixels, np.uint8)
