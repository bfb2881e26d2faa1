"""Read the boxes of AVIF and HEIC files that describe their images.

Source: ISO/IEC 14496-12 (boxes, which may come in any order) and ISO/IEC 23008-12 (properties of images).
"""

import struct
from collections.abc import Iterator
from contextlib import suppress
from fractions import Fraction
from itertools import islice
from math import prod

import numpy as np
from numpy.typing import NDArray

_HEADER, _LARGE_SIZE = struct.Struct(">L4s"), struct.Struct(">Q")
_TO_THE_END, _IS_LARGE = 0, 1
_FULL_BOX_BYTES = 4
"""Version and flags, which some boxes begin with."""
# Far beyond what cameras and programs write; each takes a microsecond.
_MAX_BOXES = 1000


def find_size(data: bytes) -> tuple[int, int]:
    """Return width and height in pixels of the largest image in a file; zeros if there is none."""
    sizes = (struct.unpack_from(">LL", data, start + _FULL_BOX_BYTES) for start in _properties(data, b"ispe", 12))
    return max(sizes, key=prod, default=(0, 0))


def crop(data: bytes, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Cut pixels (height, width, 3) to the clean aperture, if it has whole pixels in the upper left corner; Chromium ignores others."""
    # It is given by width, height, and the distances of its centre from that of the image, each as a fraction.
    height, width = pixels.shape[:2]
    for start in islice(_properties(data, b"clap", 32), 1):
        aperture = struct.unpack_from(">8l", data, start)
        with suppress(ZeroDivisionError):
            columns, rows, right, down = (Fraction(*aperture[at : at + 2]) for at in range(0, 8, 2))
            is_valid = columns.denominator == rows.denominator == 1 <= min(columns, rows)
            if is_valid and (2 * right, 2 * down) == (columns - width, rows - height):
                return pixels[: int(rows), : int(columns)]
    return pixels


def _properties(data: bytes, kind: bytes, nbytes: int) -> Iterator[int]:
    """Yield where the properties of this kind begin that have so many bytes, behind the header of their box."""
    path = ((b"meta", _FULL_BOX_BYTES), (b"iprp", 0), (b"ipco", 0), (kind, 0))
    yield from (start for start, end in _find(data, path, 0, len(data)) if end - start >= nbytes)


def _find(data: bytes, path: tuple[tuple[bytes, int], ...], at: int, end: int) -> Iterator[tuple[int, int]]:
    (wanted, skipped), *inner = path
    for kind, begin, behind in islice(_boxes(data, at, end), _MAX_BOXES):
        if kind == wanted:
            begin += skipped
            yield from _find(data, tuple(inner), begin, behind) if inner else ((begin, behind),)


def _boxes(data: bytes, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield type, beginning of the content and end of each box; the file may be truncated."""
    while at + _HEADER.size <= end:
        size, kind = _HEADER.unpack_from(data, at)
        start = at + _HEADER.size
        if size == _IS_LARGE and start + _LARGE_SIZE.size <= end:
            (size,) = _LARGE_SIZE.unpack_from(data, start)
            start += _LARGE_SIZE.size
        behind = end if size == _TO_THE_END else at + size
        if behind < start:
            return
        yield kind, start, min(behind, end)
        at = behind
