"""JPEG, by libjpeg-turbo itself: the common case, without Pillow's copies and its parsing of every segment.

What is out of the ordinary (CMYK, anything libjpeg warns of) is left to Pillow, which `app.image` asks then.
"""

from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from app.errors import BrokenPicture

_EXIF = b"Exif\0\0"
_MARKER, _START_OF_SCAN, _APP1 = 0xFF, 0xDA, 0xE1
# Of the others, or of fill bytes, a decoder may think otherwise than we do.
_HAVE_LENGTHS = {*range(0xC0, 0xD0), *range(0xDA, 0xFF)}
# A frame that one scan can finish: baseline and extended sequential.
_SEQUENTIAL = 0xC0, 0xC1

# Far beyond what cameras and programs write. Each segment before the pixels is looked at, here and by the decoders.
_MAX_SEGMENTS = 2000
# Every further scan visits every pixel again; encoders write about ten.
_MAX_SCANS = 100
# Fill bytes between segments are read one at a time.
_MAX_FILL = 200_000


class Header(NamedTuple):
    """Size in pixels as stored, and the EXIF block (without its six-byte mark), empty if there is none."""

    width: int
    height: int
    exif: bytes


def read_header(data: bytes) -> Header | None:
    """Read size and EXIF; None for what should go to Pillow.

    Raises:
        BrokenPicture: The file is built to keep a decoder busy.
    """
    exif, is_one_scan = _walked(data)
    if not is_one_scan and _is_endless(data):
        raise BrokenPicture("the JPEG has too many scans or fill bytes")
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):  # the latter for an unknown subsampling
        return None
    return Header(width, height, exif) if space in {"YCbCr", "Gray"} else None


def decode(
    data: bytes, size: tuple[int, int], at_least: tuple[int, int], into: NDArray[np.uint8] | None
) -> NDArray[np.uint8] | None:
    """Decode to RGB, at the smallest of whole, half, quarter and eighth size that is needed.

    Args:
        data: The file.
        size: Width and height, as `read_header` told.
        at_least: Width and height that are needed, as stored.
        into: UINT8 (height, width, 3) to decode into, if the picture comes out at exactly this size.

    Returns:
        UINT8 (height, width, 3), `into` itself if it was used; None for what should go to Pillow.
    """
    # libjpeg also has the eighths between, but not in fast code: five eighths take longer than the whole.
    reduction = next(
        k for k in (8, 4, 2, 1) if k == 1 or all(-(-side // k) >= least for side, least in zip(size, at_least, strict=True))
    )
    width, height = (-(-side // reduction) for side in size)
    if into is not None and not (into.flags.c_contiguous and into.shape[:2] == (height, width)):
        into = None
    buffer = None if into is None else into.reshape(-1)
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width, buffer=buffer)
    except (ValueError, KeyError):  # the latter for an unknown subsampling
        return None
    return pixels if into is None else into


def _walked(data: bytes) -> tuple[bytes, bool]:
    """Go through the segments before the pixels: the EXIF block, and whether the first scan holds all there is.

    A decoder stops behind such a scan, whatever follows.
    """
    exif, components = b"", -1
    at = 2
    for _ in range(_MAX_SEGMENTS):
        if at + 10 > len(data) or data[at] != _MARKER or data[at + 1] not in _HAVE_LENGTHS:
            return exif, False
        marker, size = data[at + 1], (data[at + 2] << 8) + data[at + 3]
        if marker == _START_OF_SCAN:
            return exif, data[at + 4] == components
        if marker in _SEQUENTIAL:
            components = data[at + 9]
        elif marker == _APP1 and not exif and data.startswith(_EXIF, at + 4):
            exif = data[at + 4 + len(_EXIF) : at + 2 + size]
        at += 2 + max(size, 2)
    raise BrokenPicture("the JPEG has too many segments before its pixels")


def _is_endless(data: bytes) -> bool:
    """Count the start-of-scan markers and the fill bytes; numpy does it ten times faster than `bytes.count`."""
    every = np.frombuffer(data, np.uint8)
    behind_ff = every[1:][every[:-1] == _MARKER]
    scans, fill = np.count_nonzero(behind_ff == _START_OF_SCAN), np.count_nonzero(behind_ff == _MARKER)
    return bool(scans > _MAX_SCANS or fill > _MAX_FILL)
