"""Read the boxes of AVIF and HEIC files that describe their images.

Source: ISO/IEC 14496-12 (boxes, which may come in any order) and ISO/IEC 23008-12 (properties of images).
"""

import struct
from collections.abc import Iterator, Sequence
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
_LONG_IDS = 3
"""The version of `infe` in which identifiers have 32 bits."""
_HEVC_420, _HEVC_ALPHA = 1, b"urn:mpeg:hevc:2015:auxid:1\0"
"""The format of one sample of each colour for four pixels, those without colours being below; the name of alpha."""
_AV1_MONOCHROME, _IS_FULL_RANGE = 0x10, 0x80
# Far beyond what cameras and programs write; each takes a microsecond.
_MAX_BOXES = 500


def find_size(data: bytes) -> tuple[int, int]:
    """Return width and height in pixels of the largest image in a file; zeros if there is none."""
    sizes = (struct.unpack_from(">LL", data, start + _FULL_BOX_BYTES) for start in _properties(data, b"ispe", 12))
    return max(sizes, key=prod, default=(0, 0))


def crop(data: bytes, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Cut pixels (height, width, 3) to a clean aperture of whole pixels in the upper left corner; Chromium ignores others."""
    # It is given by width, height, and the distances of its centre from that of the image, each as a fraction.
    height, width = pixels.shape[:2]
    for start in islice(_properties(data, b"clap", 32, of_primary=True), 1):
        aperture = struct.unpack_from(">8l", data, start)
        with suppress(ZeroDivisionError):
            columns, rows, right, down = (Fraction(*aperture[at : at + 2]) for at in range(0, 8, 2))
            is_valid = columns.denominator == rows.denominator == 1 <= min(columns, rows)
            if is_valid and (2 * right, 2 * down) == (columns - width, rows - height):
                return pixels[: int(rows), : int(columns)]
    return pixels


def turn(data: bytes, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Rotate pixels (height, width, 3) anticlockwise, then mirror them, as the properties say."""
    for start in islice(_properties(data, b"irot", 1, of_primary=True), 1):
        pixels = np.rot90(pixels, data[start] & 3)
    for start in islice(_properties(data, b"imir", 1, of_primary=True), 1):
        pixels = np.flip(pixels, data[start] & 1)
    return pixels


def is_limited_grey(data: bytes) -> bool:
    """Return whether an AVIF without colours has its black at 16 and its white at 235. Source: AV1-ISOBMFF, 2.3.3."""
    has_colours = {not data[start + 2] & _AV1_MONOCHROME for start in _properties(data, b"av1C", 4)}
    colours = _properties(data, b"colr", 11, of_primary=True)
    return has_colours == {False} and 0 in {data[at + 10] & _IS_FULL_RANGE for at in colours if data.startswith(b"nclx", at)}


def is_simple_hevc(data: bytes) -> bool:
    """Return whether all images of an HEIC have 8 bits and no more colours than photos have, and none is alpha."""
    # Source: ISO/IEC 14496-15, 8.3.2 (`hvcC`).
    formats = [(data[at + 16] & 3, data[at + 17] & 7) for at in _properties(data, b"hvcC", 23)]
    has_alpha = any(data.startswith(_HEVC_ALPHA, at + _FULL_BOX_BYTES) for at in _properties(data, b"auxC", _FULL_BOX_BYTES + 1))
    return bool(formats) and all(colours <= _HEVC_420 and not depth for colours, depth in formats) and not has_alpha


def read_profile(data: bytes) -> bytes:
    """Return the colour profile of the primary image (ISO/IEC 14496-12, 12.1.5) and what follows it; empty if it has none."""
    for start in _properties(data, b"colr", _HEADER.size, of_primary=True):
        if data[start : start + 4] in {b"prof", b"rICC"}:
            return data[start + 4 : start + 4 + int.from_bytes(data[start + 4 : start + 8])]
    return b""


def image_alone(data: bytes) -> bytearray:
    """Return a file in which nothing is marked as EXIF, as XMP, or as alpha unless the colours are multiplied by it.

    Alpha takes time and memory, and OpenCV does not decode grey with alpha. It looks for EXIF and XMP in the first 500 bytes only.
    """
    made = bytearray(data)
    references = _inside(data, ((b"meta", _FULL_BOX_BYTES), (b"iref", _FULL_BOX_BYTES)))
    is_multiplied = any(kind == b"prem" for start, end in references for kind, _, _ in _boxes(data, start, end))
    for start in () if is_multiplied else _properties(data, b"auxC", _FULL_BOX_BYTES + 1):
        made[start + _FULL_BOX_BYTES] = 0  # its name is empty now
    for start, end in _inside(data, ((b"meta", _FULL_BOX_BYTES), (b"iinf", 0))):
        names = start + _FULL_BOX_BYTES + (4 if data[start] else 2)  # behind the number of items
        for kind, entry, behind in _boxes(data, names, end):
            # Behind version and flags, the identifier and the protection.
            at = entry + _FULL_BOX_BYTES + (4 if data[entry] == _LONG_IDS else 2) + 2
            if kind == b"infe" and data[at : min(at + 4, behind)] in {b"Exif", b"mime"}:
                made[at : at + 4] = b"skip"
    return made


def _properties(data: bytes, kind: bytes, nbytes: int, *, of_primary: bool = False) -> Iterator[int]:
    """Yield where the properties of this kind begin that have so many bytes, behind the header of their box."""
    places = _places_of_primary(data) if of_primary else None
    for start, end in _inside(data, ((b"meta", _FULL_BOX_BYTES), (b"iprp", 0), (b"ipco", 0))):
        for place, (found, at, behind) in enumerate(_boxes(data, start, end), 1):
            if found == kind and behind - at >= nbytes and (places is None or place in places):
                yield at


def _places_of_primary(data: bytes) -> frozenset[int]:
    """Return which properties the primary image has, counted from 1; raise struct.error if the file is truncated."""
    primary = [start for start, _ in _inside(data, ((b"meta", _FULL_BOX_BYTES), (b"pitm", 0)))]
    associations = [start for start, _ in _inside(data, ((b"meta", _FULL_BOX_BYTES), (b"iprp", 0), (b"ipma", 0)))]
    for named, start in zip(primary, associations, strict=False):
        (wanted,) = struct.unpack_from(">L" if data[named] else ">H", data, named + _FULL_BOX_BYTES)
        entry = struct.Struct(">LB" if data[start] else ">HB")
        letter, mask, nbytes = ("H", 0x7FFF, 2) if data[start + 3] & 1 else ("B", 0x7F, 1)
        (entries,) = struct.unpack_from(">L", data, start + _FULL_BOX_BYTES)
        at = start + 2 * _FULL_BOX_BYTES
        for _ in range(min(entries, _MAX_BOXES)):
            item, count = entry.unpack_from(data, at)
            at += entry.size
            if item == wanted:
                return frozenset(value & mask for value in struct.unpack_from(f">{count}{letter}", data, at))
            at += count * nbytes
    return frozenset()


def _inside(data: bytes, path: Sequence[tuple[bytes, int]]) -> list[tuple[int, int]]:
    """Return where the content of a box begins and ends, if there is one; of several with its type, it is the first.

    Args:
        data: The file.
        path: The types of the boxes around it, and its own; how many bytes precede the boxes inside each.
    """
    start, end = 0, len(data)
    for kind, skipped in path:
        place = next(((at, behind) for found, at, behind in _boxes(data, start, end) if found == kind), None)
        if place is None:
            return []
        start, end = place[0] + skipped, place[1]
    return [(start, end)]


def _boxes(data: bytes, at: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield type, beginning of the content and end of each box, of the first ones; the file may be truncated."""
    for _ in range(_MAX_BOXES):
        if at + _HEADER.size > end:
            return
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
