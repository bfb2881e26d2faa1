"""Decode an image, draw detections on it and encode the picture."""

import struct
import zlib
from typing import Literal

import cv2
import simplejpeg

from app.imaging import drawing, jpeg
from app.imaging.decode import decode, estimate_decoding
from app.imaging.drawing import Marks
from app.imaging.header import ImageHeader

PictureType = Literal["image/jpeg", "image/png"]

_JPEG_QUALITY = 90
# Where other segments and chunks may begin in encoded pictures: after the JFIF segment, and after IHDR.
_JPEG_START, _PNG_START = 20, 33
_SEGMENT_START = 18
"""Where the profile begins in its segment: after marker, length, identifier, number and count."""
_COLOURS = slice(16, 20)
"""Where a profile says which colours it describes, such as CMYK. Source: ICC.1, 7.2.6."""
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
    segments = jpeg.profile_segments(header.data) if header.data.startswith(b"\xff\xd8") else []
    profile = b"".join(segment[_SEGMENT_START:] for segment in segments)
    is_rgb = profile[_COLOURS] == b"RGB "
    if picture_type == "image/jpeg":
        # No chroma subsampling, for thin lines and small text.
        encoded: bytes = simplejpeg.encode_jpeg(pixels, quality=_JPEG_QUALITY, colorspace="RGB", colorsubsampling="444")
        return b"".join([encoded[:_JPEG_START], *(segments if is_rgb else ()), encoded[_JPEG_START:]])
    _, file = cv2.imencode(".png", cv2.cvtColor(pixels, cv2.COLOR_RGB2BGR, dst=pixels))
    picture = file.tobytes()
    return picture[:_PNG_START] + _to_chunk(profile) + picture[_PNG_START:] if is_rgb else picture


def _to_chunk(profile: bytes) -> bytes:
    content = b"iCCPicc\0\0" + zlib.compress(profile)
    return struct.pack(">L", len(content) - 4) + content + struct.pack(">L", zlib.crc32(content))
