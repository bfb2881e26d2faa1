"""Read the header of a TIFF, and decode it with OpenCV, because pillow-simd comes without libtiff.

libtiff supports many rare variants of TIFF, with a long history of vulnerabilities. So it gets a rewritten file with only tags that
were checked here. Only the data of strips or tiles comes from the caller, in one of four simple compressions.
Source: TIFF 6.0; the codes of Deflate are those of Adobe's technical note on Photoshop.
"""

import struct
import zlib
from itertools import accumulate
from typing import NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray

from app.errors import InvalidImage, UnsupportedFormat
from app.imaging import exif

PIXEL_BYTES = 16
"""Peak memory of decoding in bytes per pixel: the copies of libtiff and OpenCV."""
FILE_COPIES = 2
"""Copies of the file that is rewritten."""
# By default, OpenCV writes warnings about a caller's image to stderr.
_SILENT = 0
# In OpenCV 4, which the embedded Triton's models use up to Python 3.12, the function is in another module.
set_log_level = getattr(cv2, "setLogLevel", None) or cv2.utils.logging.setLogLevel
set_log_level(_SILENT)

_BIG_MAGIC = b"II+\0", b"MM\0+"
_MAX_ENTRIES = 512
_MAX_PARTS = 20_000
_MAX_SAMPLES = 16
_MIN_TILE_SIDE, _MAX_TILE_SIDE = 32, 512  # OpenCV rejects smaller tiles
_TILE_STEP = 16

_SUBFILE, _WIDTH, _HEIGHT, _BITS, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER = 254, 256, 257, 258, 259, 262, 266
_STRIP_OFFSETS, _SAMPLES, _ROWS, _STRIP_SIZES, _PLANES, _PREDICTOR, _PALETTE = 273, 277, 278, 279, 284, 317, 320
_TILE_WIDTH, _TILE_HEIGHT, _TILE_OFFSETS, _TILE_SIZES, _EXTRA, _SAMPLE_FORMAT = 322, 323, 324, 325, 338, 339
_PROFILE = 34675
_INLINE_BYTES = 4
_BYTES, _SHORT, _LONG = (1, "B"), (3, "H"), (4, "L")
_TYPES = dict((_BYTES, _SHORT, _LONG))
_NONE, _LZW, _DEFLATE, _OLD_DEFLATE, _PACKBITS = 1, 5, 8, 32946, 32773
_PREDICTABLE = {_LZW, _DEFLATE, _OLD_DEFLATE}
_WHITE_IS_ZERO, _BLACK_IS_ZERO, _RGB, _INDEXED = range(4)
# Samples per pixel and bits per sample, by photometric interpretation.
_LAYOUTS = {
    _WHITE_IS_ZERO: {(1, 1), (1, 8)},
    _BLACK_IS_ZERO: {(1, 1), (1, 8), (2, 8), (1, 16)},
    _RGB: {(3, 8), (4, 8), (3, 16), (4, 16)},
    _INDEXED: {(1, 8)},
}
_WITH_ALPHA = {2, 4}
# Bits per sample with which OpenCV decodes the part of a tile that is beyond the width into the pixels.
_MISREAD_TILES = {(16,), (8, 8)}
_PALETTE_VALUES = 3 * 256
_MAX_BYTE = 255
# Maximum number of values by tag, for all tags that are read.
_WANTED = {
    **dict.fromkeys((_WIDTH, _HEIGHT, _SUBFILE, _COMPRESSION, _PHOTOMETRIC, _FILL_ORDER, _SAMPLES, _ROWS), 1),
    **dict.fromkeys((_PLANES, _PREDICTOR, _TILE_WIDTH, _TILE_HEIGHT), 1),
    **dict.fromkeys((_BITS, _SAMPLE_FORMAT), _MAX_SAMPLES),
    **dict.fromkeys((_STRIP_OFFSETS, _STRIP_SIZES, _TILE_OFFSETS, _TILE_SIZES), _MAX_PARTS),
    _PALETTE: _PALETTE_VALUES,
}
_ASSOCIATED_ALPHA = 1
_THUMBNAIL = 1


class TiffHeader(NamedTuple):
    """The first image of a TIFF."""

    width: int
    height: int
    """As stored, as the width; pixels."""
    orientation: int
    """As in EXIF, 1 to 8."""
    order: str
    """Byte order, `<` or `>` as in `struct`."""
    tags: dict[int, tuple[int, ...]]
    """Values by tag for the rewritten file, without offsets and sizes of the parts."""
    parts: list[tuple[int, int]]
    """Offset and size in bytes of each strip or tile in the file."""
    needed: list[int]
    """Size of each in bytes when it is decompressed."""

    @property
    def is_decoded_apart(self) -> bool:
        """Whether only what libtiff says while it decodes tells that data is missing. `decode` does not hear it."""
        return self.tags[_COMPRESSION][0] in {_LZW, _PACKBITS}


def read_header(data: bytes) -> TiffHeader:
    """Read the first directory; raise UnsupportedFormat, or InvalidImage if it is truncated or corrupt."""
    if data.startswith(_BIG_MAGIC):
        raise UnsupportedFormat("the image is a BigTIFF; send a plain TIFF, a PNG or a JPEG")
    try:
        return _read(data)
    except struct.error as error:
        raise InvalidImage("the TIFF header cannot be read") from error


def decode(data: bytes, header: TiffHeader) -> NDArray[np.uint8]:
    """Decode to UINT8 (height, width, 3) RGB, as stored; raise InvalidImage for truncated or corrupt data."""
    if header.tags[_COMPRESSION][0] in {_DEFLATE, _OLD_DEFLATE}:  # of which libtiff leaves black what is missing
        view = memoryview(data)
        for (at, size), needed in zip(header.parts, header.needed, strict=True):
            _require_inflated(view[at : at + size], needed, header.needed[0])
    file = np.frombuffer(rewrite(data, header), np.uint8)
    try:
        pixels = cv2.imdecode(file, cv2.IMREAD_COLOR_RGB | cv2.IMREAD_IGNORE_ORIENTATION)
    except cv2.error as error:
        raise InvalidImage("the image data is truncated or corrupt") from error
    if pixels is None or pixels.shape != (header.height, header.width, 3):
        raise InvalidImage("the image data is truncated or corrupt")
    return np.asarray(pixels, np.uint8)


def _require_inflated(part: memoryview, needed: int, full: int) -> None:
    # The last part may be as long as a full one, but zeros or changed bits may decode to any number of bytes.
    inflater = zlib.decompressobj()
    try:
        length = len(inflater.decompress(part, needed))
        rest = inflater.decompress(inflater.unconsumed_tail, full)
    except zlib.error as error:
        raise InvalidImage("the image data is truncated or corrupt") from error
    if length < needed or (rest and not inflater.eof):
        raise InvalidImage("the image data is truncated or corrupt")


def rewrite(data: bytes, header: TiffHeader) -> bytes:
    """Return a TIFF with the same pixels that contains only what `read_header` has checked."""
    is_tiled = _TILE_WIDTH in header.tags
    offsets_tag, sizes_tag = (_TILE_OFFSETS, _TILE_SIZES) if is_tiled else (_STRIP_OFFSETS, _STRIP_SIZES)
    sizes = tuple(size for _, size in header.parts)
    tags = {**header.tags, offsets_tag: (0,) * len(sizes), sizes_tag: sizes}
    start = len(_write_directory(tags, header.order))
    tags[offsets_tag] = tuple(accumulate(sizes[:-1], initial=start))
    view = memoryview(data)
    return b"".join([_write_directory(tags, header.order), *(view[at : at + size] for at, size in header.parts)])


def read_size(data: bytes) -> tuple[int, int]:
    """Return width and height in pixels, as stored, or zeros; raise struct.error or InvalidImage for a corrupt header."""
    found = _read_directory(data, _order(data), {_WIDTH: 1, _HEIGHT: 1})
    return _one(found, _WIDTH, 0), _one(found, _HEIGHT, 0)


def _order(data: bytes) -> str:
    return "<" if data.startswith(b"II") else ">"


def _read(data: bytes) -> TiffHeader:
    order = _order(data)
    found = _read_directory(data, order, _WANTED)
    tags = _check_pixels(found)
    width, height = tags[_WIDTH][0], tags[_HEIGHT][0]
    if _TILE_OFFSETS in found:
        sides = _one(found, _TILE_WIDTH, 0), _one(found, _TILE_HEIGHT, 0)
        if any(not _MIN_TILE_SIDE <= side <= _MAX_TILE_SIDE or side % _TILE_STEP for side in sides):
            raise UnsupportedFormat(f"the TIFF's tiles must have sides of {_MIN_TILE_SIDE} to {_MAX_TILE_SIDE} pixels")
        if width % sides[0] and tags[_BITS] in _MISREAD_TILES:
            raise UnsupportedFormat("the TIFF's tiles must fill its width if they are grey with 16 bits or alpha")
        last_rows = sides[1]
        tags |= {_TILE_WIDTH: sides[:1], _TILE_HEIGHT: sides[1:]}
        number = -(-width // sides[0]) * -(-height // sides[1])
        offsets, sizes = found[_TILE_OFFSETS], found.get(_TILE_SIZES, ())
    else:
        rows = max(1, min(_one(found, _ROWS, height), height))
        tags[_ROWS] = (rows,)
        number = -(-height // rows)
        sides = width, rows
        last_rows = height - rows * (number - 1)
        offsets, sizes = found.get(_STRIP_OFFSETS, ()), found.get(_STRIP_SIZES, ())
    if not len(offsets) == len(sizes) == number <= _MAX_PARTS:
        raise InvalidImage("the TIFF has too many strips or tiles, or not those that its size needs")
    parts = list(zip(offsets, sizes, strict=True))
    if sum(sizes) > len(data) or any(at + size > len(data) for at, size in parts):
        raise InvalidImage("the TIFF is truncated, or its strips overlap")
    row_bytes = -(-sides[0] * sum(tags[_BITS]) // 8)
    needed = [*[row_bytes * sides[1]] * (number - 1), row_bytes * last_rows]
    # libtiff does not reject parts that are too short.
    if tags[_COMPRESSION] == (_NONE,) and any(size < least for size, least in zip(sizes, needed, strict=True)):
        raise InvalidImage("the TIFF's strips or tiles are too short")
    return TiffHeader(width, height, exif.read_orientation(data), order, tags, parts, needed)


def _check_pixels(found: dict[int, tuple[int, ...]]) -> dict[int, tuple[int, ...]]:
    width, height = _one(found, _WIDTH, 0), _one(found, _HEIGHT, 0)
    if not width or not height:
        raise InvalidImage("the TIFF has no pixels")
    if _one(found, _SUBFILE, 0) & _THUMBNAIL:
        raise UnsupportedFormat("the TIFF begins with a thumbnail, as raw photos of cameras do; send a JPEG or PNG of it")
    compression, photometric, samples = _one(found, _COMPRESSION, _NONE), _one(found, _PHOTOMETRIC, -1), _one(found, _SAMPLES, 1)
    if compression not in {_NONE, _PACKBITS, *_PREDICTABLE}:
        raise UnsupportedFormat("the TIFF is compressed in a way that is not supported; use LZW, Deflate, PackBits or none")
    bits = found.get(_BITS, (1,))
    if (samples, bits[0]) not in _LAYOUTS.get(photometric, ()) or {*bits} != {bits[0]} or {*found.get(_SAMPLE_FORMAT, (1,))} != {1}:
        raise UnsupportedFormat("the TIFF's pixels are not grey, RGB or RGBA of 8 or 16 bits, black and white or a palette")
    predictor = _one(found, _PREDICTOR, 1)
    if (_one(found, _PLANES, 1), _one(found, _FILL_ORDER, 1)) != (1, 1) or predictor not in {1, 2}:
        raise UnsupportedFormat("the TIFF's samples are arranged in a way that is not supported; they must be chunky")
    tags = {
        _WIDTH: (width,),
        _HEIGHT: (height,),
        _BITS: bits[:1] * samples,
        _COMPRESSION: (compression,),
        _PHOTOMETRIC: (photometric,),
        _SAMPLES: (samples,),
    }
    if predictor != 1 and compression in _PREDICTABLE:
        tags[_PREDICTOR] = (predictor,)
    if photometric == _INDEXED:
        if len(found.get(_PALETTE, ())) != _PALETTE_VALUES:
            raise InvalidImage("the TIFF's palette has not 256 colours")
        palette = found[_PALETTE]  # of 16 bits, but some programs write 8
        tags[_PALETTE] = palette if max(palette) > _MAX_BYTE else tuple(257 * value for value in palette)
    if samples in _WITH_ALPHA:
        tags[_EXTRA] = (_ASSOCIATED_ALPHA,)  # in any case: otherwise libtiff would blend the colours with black
    return tags


def _one(found: dict[int, tuple[int, ...]], tag: int, default: int) -> int:
    return found.get(tag, (default,))[0]


def read_profile(data: bytes) -> bytes:
    """Return the colour profile (ICC.1, B.3); empty if there is none. Raises struct.error if the file is truncated."""
    order = _order(data)
    (at,) = struct.unpack_from(order + "L", data, 4)
    (entries,) = struct.unpack_from(order + "H", data, at)
    for entry in range(at + 2, at + 2 + 12 * min(entries, _MAX_ENTRIES), 12):
        tag, _, nbytes, place = struct.unpack_from(order + "HHLL", data, entry)
        if tag == _PROFILE:
            return data[place : place + nbytes]
    return b""


def _read_directory(data: bytes, order: str, wanted: dict[int, int]) -> dict[int, tuple[int, ...]]:
    # `wanted` has the maximum numbers of values; the first of equal tags counts.
    (at,) = struct.unpack_from(order + "L", data, 4)
    (entries,) = struct.unpack_from(order + "H", data, at)
    if entries > _MAX_ENTRIES:
        raise InvalidImage("the TIFF has too many tags")
    found: dict[int, tuple[int, ...]] = {}
    for entry in range(at + 2, at + 2 + 12 * entries, 12):
        tag, kind, count = struct.unpack_from(order + "HHL", data, entry)
        if tag not in wanted or tag in found or kind not in _TYPES or count == 0:
            continue
        if count > wanted[tag]:
            raise InvalidImage(f"the TIFF's tag {tag} has too many values")
        layout = f"{order}{count}{_TYPES[kind]}"
        place = entry + 8
        if struct.calcsize(layout) > _INLINE_BYTES:
            (place,) = struct.unpack_from(order + "L", data, place)
        found[tag] = struct.unpack_from(layout, data, place)
    return found


def _write_directory(tags: dict[int, tuple[int, ...]], order: str) -> bytes:
    start = 8
    behind = start + 2 + 12 * len(tags) + 4
    entries = b""
    values = b""
    for tag in sorted(tags):
        kind, letter = _LONG if max(tags[tag]) >> 16 or tag in {_STRIP_OFFSETS, _TILE_OFFSETS} else _SHORT
        value = struct.pack(f"{order}{len(tags[tag])}{letter}", *tags[tag])
        entries += struct.pack(order + "HHL", tag, kind, len(tags[tag]))
        if len(value) > _INLINE_BYTES:
            entries += struct.pack(order + "L", behind + len(values))
            values += value + bytes(len(value) % 2)
        else:
            entries += value.ljust(_INLINE_BYTES, b"\0")
    magic = b"II*\0" if order == "<" else b"MM\0*"
    return magic + struct.pack(order + "LH", start, len(tags)) + entries + bytes(4) + values
