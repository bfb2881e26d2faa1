"""JPEG, by libjpeg-turbo itself: the common case, without Pillow's copies and its parsing of every segment.

What is out of the ordinary (CMYK, anything libjpeg warns of) is left to Pillow, which `app.image` asks then.
"""

from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

_EXIF = b"Exif\0\0"
_START_OF_SCAN, _APP1 = 0xDA, 0xE1


class Header(NamedTuple):
    """Size in pixels as stored, and the EXIF block (without its six-byte mark), empty if there is none."""

    width: int
    height: int
    exif: bytes


def read_header(data: bytes) -> Header | None:
    """Read size and EXIF; None for what should go to Pillow."""
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):  # the latter for an unknown subsampling
        return None
    return Header(width, height, _exif(data)) if space in {"YCbCr", "Gray"} else None


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


def _exif(data: bytes) -> bytes:
    """Find the EXIF block among the segments before the pixels."""
    at = 2
    while at + 4 <= len(data) and data[at] == 0xFF:  # noqa: PLR2004
        marker, size = data[at + 1], int.from_bytes(data[at + 2 : at + 4], "big")
        if marker == _START_OF_SCAN:
            break
        if marker == _APP1 and data.startswith(_EXIF, at + 4):
            return data[at + 4 + len(_EXIF) : at + 2 + size]
        at += 2 + size
    return b""
