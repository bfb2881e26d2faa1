"""Read the colour profile of an image, and write it into a picture. Source: ICC.1, 7.2 and annex B."""

import struct
import zlib
from contextlib import suppress
from io import BytesIO

from PIL import Image

from app.imaging import heif, jpeg
from app.imaging.header import ImageHeader

_COLOURS = slice(16, 20)
"""Where a profile says which colours it describes, such as CMYK."""
_SEGMENT_BYTES, _MAX_SEGMENTS = 65519, 255
# Where other segments and chunks may begin in encoded pictures: after the JFIF segment, and after IHDR.
_JPEG_START, _PNG_START = 20, 33


def read_rgb_profile(header: ImageHeader) -> bytes:
    """Return the profile of an image; empty if it has none, if that is broken, or not one of RGB, as decoded pixels are."""
    profile = b""
    with suppress(Exception):  # Pillow's plugins raise anything; the pixels have been decoded without what is broken
        profile = _read(header)
    return profile if profile[_COLOURS] == b"RGB " else b""


def _read(header: ImageHeader) -> bytes:
    data = header.data
    if data.startswith(b"\xff\xd8"):
        return jpeg.read_profile(data)
    if data[4:8] == b"ftyp":
        return heif.read_profile(data)
    file = header.file
    if (
        file is None or file.format != "WEBP"
    ):  # a WebP opened again would take its memory twice; a PNG was opened without its profile
        file = Image.open(BytesIO(data), formats=("PNG", "TIFF"))
    return bytes(file.info.get("icc_profile") or b"")


def add_to_jpeg(picture: bytes, profile: bytes) -> bytes:
    """Return a JPEG that simplejpeg has encoded, with a profile unless that is too long."""
    parts = [profile[at : at + _SEGMENT_BYTES] for at in range(0, len(profile), _SEGMENT_BYTES)]
    if not 0 < len(parts) <= _MAX_SEGMENTS:
        return picture
    segments = [
        struct.pack(">HH12sBB", 0xFFE2, len(part) + 16, jpeg.PROFILE, number, len(parts)) + part
        for number, part in enumerate(parts, 1)
    ]
    return b"".join([picture[:_JPEG_START], *segments, picture[_JPEG_START:]])


def add_to_png(picture: bytes, profile: bytes) -> bytes:
    """Return a PNG that OpenCV has encoded, with a profile."""
    content = b"iCCPicc\0\0" + zlib.compress(profile)
    chunk = struct.pack(">L", len(content) - 4) + content + struct.pack(">L", zlib.crc32(content))
    return b"".join([picture[:_PNG_START], *([chunk] if profile else []), picture[_PNG_START:]])
