"""EXIF orientation: read it, and turn pixels upright."""

import struct
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags

# Functions that turn pixels (height, width, 3) upright, by orientation.
_TURNS: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90,
}
SIDEWAYS = range(5, 9)
"""Orientations with width and height swapped in the upright image."""
# Types of numbers that fit into an entry, by code: SHORT, and those that some programs write and Pillow reads.
_NUMBERS = {3: "H", 4: "L", 6: "b", 8: "h", 9: "l", 11: "f", 13: "L"}


def read_orientation(exif: bytes) -> int:
    """Read the orientation, 1 to 8, from an EXIF block; 1 if it has none. Source: CIPA DC-008 (EXIF), 4.6.2; TIFF 6.0, 2."""
    # Pillow copies the data of every tag, which may be gigabytes for a small malicious block.
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(order + "L", exif, 4)
        (tags,) = struct.unpack_from(order + "H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * tags, 12):
            tag, kind = struct.unpack_from(order + "HHxxxxxxxx", exif, entry)
            if tag == ExifTags.Base.Orientation:
                (value,) = struct.unpack_from(order + _NUMBERS.get(kind, "x"), exif, entry + 8) or (1,)
                return int(value) if value in _TURNS else 1
    except struct.error:  # a broken block does not make the image invalid; viewers show it as stored
        pass
    return 1


def turn_upright(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Turn stored pixels (height, width, 3) of orientation 2 to 8 upright; return a contiguous array."""
    return np.ascontiguousarray(_TURNS[orientation](pixels))
