"""Read the colour profile of an image, and write it into a picture. Source: ICC.1, 7.2 and annex B."""

import struct
import zlib
from contextlib import suppress

from app.imaging import heif, jpeg, tiff
from app.imaging.header import ImageHeader, png_chunks

_COLOURS = slice(16, 20)
"""Where a profile says which colours it describes, such as CMYK."""
_MAX_BYTES = 4 << 20
_SEGMENT_BYTES = 65519
# Where other segments and chunks may begin in encoded pictures: after the JFIF segment, and after IHDR.
_JPEG_START, _PNG_START = 20, 33


def read_rgb_profile(header: ImageHeader) -> bytes:
    """Return the profile of an image; empty if it has none, if that is broken, or not one of RGB, as decoded pixels are."""
    profile = b""
    with suppress(Exception):  # what is broken raises struct.error, zlib.error ...; the pixels have been decoded without it
        profile = _read(header)
    size = int.from_bytes(profile[:4])  # it begins with its size
    return profile[:size] if _COLOURS.stop < size <= min(len(profile), _MAX_BYTES) and profile[_COLOURS] == b"RGB " else b""


def _read(header: ImageHeader) -> bytes:
    # Not by Pillow, but for a WebP that it has opened already: it reads all blocks of a PNG or TIFF, however many there are.
    data = header.data
    if header.file is not None and header.file.format == "WEBP":
        return bytes(header.file.info.get("icc_profile") or b"")
    if header.tiff is not None:
        return tiff.read_profile(data)
    if data[4:8] == b"ftyp":
        return heif.read_profile(data)
    if data.startswith(b"\xff\xd8"):
        return jpeg.read_profile(data)
    start, end = next(((start, end) for kind, start, end in png_chunks(data) if kind == b"iCCP"), (0, 0))
    _, _, compressed = data[start:end].partition(b"\0")  # behind its name, and the method of compression
    return zlib.decompressobj().decompress(compressed[1:], _MAX_BYTES)


def add_to_jpeg(picture: bytes, profile: bytes) -> bytes:
    """Return a JPEG that simplejpeg has encoded, with a profile."""
    parts = [profile[at : at + _SEGMENT_BYTES] for at in range(0, len(profile), _SEGMENT_BYTES)]
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
