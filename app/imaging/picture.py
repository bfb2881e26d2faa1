"""Decode an image, draw detections on it and encode the picture."""

from typing import Literal

import cv2
import simplejpeg

from app.imaging import drawing, profile
from app.imaging.decode import decode, estimate_decoding
from app.imaging.drawing import Marks
from app.imaging.header import ImageHeader

PictureType = Literal["image/jpeg", "image/png"]

_JPEG_QUALITY = 90
# Per pixel; twice, because encoders enlarge their output as it grows.
_ENCODED_BYTES = 2 * 3


def estimate_picture_bytes(header: ImageHeader) -> int:
    """Estimate the peak memory of `draw_picture` in bytes."""
    size = header.width, header.height
    return estimate_decoding(header, size).nbytes + header.width * header.height * _ENCODED_BYTES


def draw_picture(header: ImageHeader, marks: Marks, picture_type: PictureType) -> bytes:
    """Draw detections on an image at its full size, and encode it with its profile if that is of RGB; raise InvalidImage."""
    pixels = decode(header, (header.width, header.height), allows_truncated=True)
    if not pixels.flags.writeable:  # a view of Pillow's memory
        pixels = pixels.copy()
    drawing.draw(pixels, marks)
    colours = profile.read_rgb_profile(header)
    if picture_type == "image/jpeg":
        # No chroma subsampling, for thin lines and small text.
        encoded: bytes = simplejpeg.encode_jpeg(pixels, quality=_JPEG_QUALITY, colorspace="RGB", colorsubsampling="444")
        return profile.add_to_jpeg(encoded, colours)
    _, file = cv2.imencode(".png", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR, dst=pixels))
    return profile.add_to_png(file.tobytes(), colours)
