"""Read how many pixels an image claims to have, in next to no time and without checking anything else."""

import struct

from app.errors import InvalidImage
from app.imaging import avif, formats, jpeg, tiff
from app.imaging.header import PixelLimits

# A JPEG has at least two bits for each block of 64 pixels: with fewer bytes than this, four megapixels at the most.
_SMALL_JPEG_BYTES = 1 << 14
# How width and height are stored, and where.
_PLACES = {
    "PNG": (">II", 16),
    "GIF": ("<HH", 6),
    "BMP": ("<ii", 18),  # a negative height: stored from top to bottom
}


def count_pixels(data: bytes, limits: PixelLimits) -> int:
    """Return width x height as an encoded image claims them; 0 for a small JPEG, and for an image that will be rejected."""
    name = formats.find_format(data)
    if name is None or (name == "JPEG" and len(data) < _SMALL_JPEG_BYTES):
        return 0
    try:
        width, height = _read_size(data, name)
    except (struct.error, InvalidImage):  # the former if it is truncated
        return 0
    pixels = abs(width * height)
    return pixels if pixels <= limits.of(name) else 0


def _read_size(data: bytes, name: str) -> tuple[int, int]:
    if name == "JPEG":
        return jpeg.read_frame_size(data)
    if name == "AVIF":
        return avif.find_size(data)
    if name == "TIFF":
        return tiff.read_size(data)
    return _read_webp_size(data) if name == "WEBP" else _read_pair(data, *_PLACES[name])


def _read_webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":  # 24 bits each, less one
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":  # 14 bits each, less one
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":  # 14 bits each, then two of a scale
        width, height = _read_pair(data, "<HH", 26)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0


def _read_pair(data: bytes, layout: str, offset: int) -> tuple[int, int]:
    first, second = struct.unpack_from(layout, data, offset)
    return first, second
