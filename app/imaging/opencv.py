"""Decode TIFF with OpenCV, because pillow-simd comes without libtiff."""

import cv2
import numpy as np
from numpy.typing import NDArray

from app.errors import InvalidImage
from app.imaging import tiff
from app.imaging.tiff import TiffHeader

# By default, OpenCV writes warnings about a caller's image to stderr.
_SILENT = 0
# In OpenCV 4, which the embedded Triton's models use up to Python 3.12, the function is in another module.
(getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel)(_SILENT)

PIXEL_BYTES = 16
"""Peak memory of decoding in bytes per pixel: the copies of libtiff and OpenCV."""
FILE_COPIES = 2
"""Copies of the file that is rewritten."""


def decode(data: bytes, header: TiffHeader) -> NDArray[np.uint8]:
    """Decode a TIFF, rewritten so that it contains only what was checked, to UINT8 (height, width, 3) RGB, as stored.

    Raises:
        InvalidImage: The data is truncated or corrupt.
    """
    file = np.frombuffer(tiff.rewrite(data, header), np.uint8)
    try:
        pixels = cv2.imdecode(file, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise InvalidImage("the image data is truncated or corrupt") from error
    if pixels is None or pixels.shape != (header.height, header.width, 3):
        raise InvalidImage("the image data is truncated or corrupt")
    return np.asarray(pixels, np.uint8)
