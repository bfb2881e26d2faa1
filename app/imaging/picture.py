"""Decode an image, draw detections on it and encode the picture: what the pipeline needs of this package beside `canvas`."""

from collections.abc import Callable
from typing import Literal

import cv2
import numpy as np
import simplejpeg
from numpy.typing import NDArray

from app.imaging import drawing
from app.imaging.decode import decode, estimate_decode_bytes
from app.imaging.drawing import Marks
from app.imaging.header import PixelLimits, read_header

PictureType = Literal["image/jpeg", "image/png"]
"""What a picture is encoded as."""

_JPEG_QUALITY = 90
# Twice, because encoders enlarge their output as it grows.
_ENCODED_BYTES = 2 * 3


def draw_picture(
    data: bytes, marks: Marks, picture_type: PictureType, limits: PixelLimits, reserve: Callable[[int], None]
) -> bytes:
    """Draw on an image, at its full size.

    Args:
        data: The encoded image.
        marks: What to draw.
        picture_type: Of the result.
        limits: Maximum sizes of images.
        reserve: Called once the header is accepted, with an estimate of the memory that this takes, bytes; raises what the
            caller wants to be raised if there is none.

    Returns:
        The encoded picture.

    Raises:
        GatewayError: As `read_header`, `decode` and `reserve` say.
    """
    header = read_header(data, limits)
    size = header.width, header.height
    reserve(estimate_decode_bytes(header, size) + header.width * header.height * _ENCODED_BYTES)
    pixels = decode(header, size)
    if not pixels.flags.writeable:  # Pillow's own
        pixels = pixels.copy()
    drawing.draw(pixels, marks)
    return _encode(pixels, picture_type)


def _encode(pixels: NDArray[np.uint8], picture_type: PictureType) -> bytes:
    """Encode pixels (height, width, 3) RGB, whose memory is used up."""
    if picture_type == "image/jpeg":
        # Colours at full resolution, for thin lines and small text.
        encoded: bytes = simplejpeg.encode_jpeg(pixels, quality=_JPEG_QUALITY, colorspace="RGB", colorsubsampling="444")
        return encoded
    _, file = cv2.imencode(".png", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR, dst=pixels))
    return file.tobytes()
