"""Read how many pixels an image claims to have, in next to no time and without checking anything else."""

import struct

from app.errors import InvalidImage
from app.imaging import jpeg
from app.imaging.header import PixelLimits

_JPEG = b"\xff\xd8\xff"
# A JPEG has at least two bits for each block of 64 pixels.
_SMALL_JPEG_BYTES = 1 << 14


def count_pixels(data: bytes, limits: PixelLimits) -> int:
    """Return width x height as an encoded image claims them; 0 for a small JPEG, and for an image that will be rejected."""
    is_jpeg = data.startswith(_JPEG)
    if is_jpeg and len(data) < _SMALL_JPEG_BYTES:
        return 0
    try:
        width, height = jpeg.read_frame_size(data) if is_jpeg else _read_size(data)
    except (struct.error, InvalidImage):  # the former if it is truncated
        return 0
    pixels = abs(width * height)
    return pixels if pixels <= (limits.scalable if is_jpeg else limits.other) else 0


def _read_size(data: bytes) -> tuple[int, int]:
    if data.startswith(b"\x89PNG"):
        return _two(">II", data, 16)
    if data.startswith(b"GIF8"):
        return _two("<HH", data, 6)
    if data.startswith(b"BM"):
        return _two("<ii", data, 18)  # a negative height: stored from top to bottom
    return _read_webp_size(data)


def _read_webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":  # 24 bits each, less one
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":  # 14 bits each, less one
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":  # 14 bits each, then two of a scale
        width, height = _two("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0


def _two(layout: str, data: bytes, offset: int) -> tuple[int, int]:
    first, second = struct.unpack_from(layout, data, offset)
    return first, second
