"""Read the tags of a TIFF, whose pixels are decoded in a process of their own (`apart`).

Source: TIFF 6.0; the codes of Deflate are those of Adobe's technical note on Photoshop.
"""

import struct
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from app.errors import InvalidImage, UnsupportedFormat

_BIG_MAGIC = b"II+\0", b"MM\0+"
_MAX_ENTRIES = 512
_MAX_VALUES = 16
_INLINE_BYTES = 4
# Types of whole numbers, by code: BYTE, SHORT and LONG.
_WHOLE = {1: "B", 3: "H", 4: "L"}
_SIZE = _WIDTH, _HEIGHT = 256, 257
ORIENTATION, _ALPHA = 274, 338

_PIXELS = "the TIFF's pixels are not grey, RGB or RGBA of 8 or 16 bits, black and white or a palette"
_ORDER = "the TIFF's samples are arranged in a way that is not supported; they must be chunky"
# Supported values by tag, and the error for all others: OpenCV decodes more, but not all kinds without a loss.
_SUPPORTED = {
    254: ({0, 2, 4, 6}, "the TIFF begins with a thumbnail, as raw photos of cameras do; send a JPEG or PNG of it"),
    258: ({1, 8, 16}, _PIXELS),  # bits per sample
    259: ({1, 5, 8, 32773, 32946}, "the TIFF is compressed in a way that is not supported; use LZW, Deflate, PackBits or none"),
    262: ({0, 1, 2, 3}, _PIXELS),  # grey with white or black as zero, RGB, palette
    266: ({1}, _ORDER),  # order of bits
    284: ({1}, _ORDER),  # one plane
    317: ({1, 2}, _ORDER),  # predictor
    339: ({1}, _PIXELS),  # unsigned samples
}


def read_header(data: bytes) -> tuple[int, int]:
    """Return width and height in pixels of the first image, as stored.

    Raises:
        UnsupportedFormat: The variant of TIFF is not supported.
        InvalidImage: The header is truncated or corrupt.
    """
    if data.startswith(_BIG_MAGIC):
        raise UnsupportedFormat("the image is a BigTIFF; send a plain TIFF, a PNG or a JPEG")
    try:
        found = read_tags(data, {*_SIZE, *_SUPPORTED})
    except struct.error as error:
        raise InvalidImage("the TIFF header cannot be read") from error
    for tag, (values, problem) in _SUPPORTED.items():
        if not values.issuperset(found.get(tag, ())):
            raise UnsupportedFormat(problem)
    return _size_in(found)


def read_size(data: bytes) -> tuple[int, int]:
    """Return width and height in pixels, as stored, without other checks; zeros if they are missing.

    Raises:
        struct.error: The header is truncated.
        InvalidImage: The header is corrupt.
    """
    return _size_in(read_tags(data, _SIZE))


def with_plain_pixels(data: bytes) -> bytearray:
    """Return the file with the orientation and kind of alpha for which libtiff neither turns pixels nor blends them with black.

    Raises:
        struct.error: The header is truncated.
        InvalidImage: The header is corrupt.
    """
    file = bytearray(data)
    for _, layout, place in _entries(data, (ORIENTATION, _ALPHA), _WHOLE):
        struct.pack_into(layout, file, place, *[1] * len(struct.unpack_from(layout, data, place)))
    return file


def _size_in(found: dict[int, tuple[int, ...]]) -> tuple[int, int]:
    return found.get(_WIDTH, (0,))[0], found.get(_HEIGHT, (0,))[0]


def read_tags(data: bytes, wanted: Collection[int], numbers: Mapping[int, str] = _WHOLE) -> dict[int, tuple[Any, ...]]:
    """Return the values of the wanted tags in the first directory; the first of equal tags counts.

    Args:
        data: A TIFF, or an EXIF block, which has the same layout.
        wanted: The tags.
        numbers: Types of the values to read, by code, as in `struct`.

    Raises:
        struct.error: The directory is truncated.
        InvalidImage: There are too many tags or values.
    """
    found: dict[int, tuple[Any, ...]] = {}
    for tag, layout, place in _entries(data, wanted, numbers):
        if tag not in found:
            found[tag] = struct.unpack_from(layout, data, place)
    return found


def _entries(data: bytes, wanted: Collection[int], numbers: Mapping[int, str]) -> Iterator[tuple[int, str, int]]:
    """Yield the wanted tags, with the layout of their values as in `struct`, and their position."""
    order = "<" if data.startswith(b"II") else ">"
    (at,) = struct.unpack_from(order + "L", data, 4)
    (entries,) = struct.unpack_from(order + "H", data, at)
    if entries > _MAX_ENTRIES:
        raise InvalidImage("the TIFF has too many tags")
    for entry in range(at + 2, at + 2 + 12 * entries, 12):
        tag, kind, count = struct.unpack_from(order + "HHL", data, entry)
        if tag not in wanted or kind not in numbers or count == 0:
            continue
        if count > _MAX_VALUES:
            raise InvalidImage(f"the TIFF's tag {tag} has too many values")
        layout = f"{order}{count}{numbers[kind]}"
        place = entry + 8
        if struct.calcsize(layout) > _INLINE_BYTES:
            (place,) = struct.unpack_from(order + "L", data, place)
        yield tag, layout, place
