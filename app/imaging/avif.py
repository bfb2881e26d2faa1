"""Read the header of an AVIF, and write the file anew for the decoder.

The decoder gets a file with nothing but the primary image, one frame of AV1 whose size was read from the frame's own header: no
other image, transparency, animation or metadata of the caller's, each of which could have a size of its own.
Source: ISO/IEC 14496-12 and 23008-12 (boxes), AV1 Image File Format 1.1, AV1 Bitstream & Decoding Process 5.3 to 5.5.
"""

import struct
from collections.abc import Iterator
from typing import NamedTuple

from app.errors import InvalidImage, UnsupportedFormat
from app.imaging import av1

_MAX_BOXES = 1000
_MAX_EXTENTS = 64
_NCLX_BYTES = 11
_ITEM_LAYOUTS = {2: ">HH4s", 3: ">LH4s"}
_META_BYTES = 1 << 16
# EXIF orientation by quarter turns anticlockwise and the axis of the mirroring that follows them: none, vertical, horizontal.
_ORIENTATIONS = ((1, 8, 3, 6), (4, 5, 2, 7), (2, 7, 4, 5))


class AvifHeader(NamedTuple):
    """The primary image of an AVIF."""

    width: int
    """Pixels, as stored."""
    height: int
    """Pixels, as stored."""
    orientation: int
    """As in EXIF, 1 to 8; that of the file's own boxes, because its EXIF block does not count."""
    configuration: bytes
    """Four bytes that describe the pixels to the decoder."""
    colours: bytes
    """The box content that tells how colours are coded; empty if there is none."""
    extents: list[tuple[int, int]]
    """Where the frame lies in the file: offset and size in bytes."""


def read_header(data: bytes) -> AvifHeader:
    """Read the boxes, and the header of the frame.

    Raises:
        UnsupportedFormat: The image is composed of several ones.
        InvalidImage: It is broken.
    """
    try:
        header = _read(data)
    except (struct.error, IndexError, KeyError) as error:
        raise InvalidImage("the AVIF header cannot be read") from error
    pieces = _pieces(data, header)
    frame = pieces[0] if len(pieces) == 1 else b"".join(pieces)
    if av1.read_size(frame) != (header.width, header.height):
        raise InvalidImage("the AVIF's frame has another size than its header says, or is not a single one")
    return header


def find_size(data: bytes) -> tuple[int, int]:
    """Return width and height as some image of the file has them, without reading its boxes; zeros if there is none."""
    at = data.find(b"ispe", 0, _META_BYTES)
    return struct.unpack_from(">LL", data, at + 8) if at > 0 else (0, 0)


def rewrite(data: bytes, header: AvifHeader) -> bytes:
    """Write an AVIF of the same pixels that has nothing but what `read_header` has checked."""
    properties = _box(b"ispe", struct.pack(">LLL", 0, header.width, header.height)) + _box(b"av1C", header.configuration)
    count = 2
    if header.colours:
        properties += _box(b"colr", header.colours)
        count = 3
    associations = struct.pack(">LLHB", 0, 1, 1, count) + bytes(range(1, count + 1))
    pieces = _pieces(data, header)
    size = sum(map(len, pieces))

    def meta(offset: int) -> bytes:
        return _box(
            b"meta",
            bytes(4)
            + _box(b"hdlr", bytes(8) + b"pict" + bytes(13))
            + _box(b"pitm", struct.pack(">LH", 0, 1))
            + _box(b"iloc", struct.pack(">LHHHHHLL", 0, 0x4400, 1, 1, 0, 1, offset, size))
            + _box(b"iinf", struct.pack(">LH", 0, 1) + _box(b"infe", struct.pack(">LHH", 2 << 24, 1, 0) + b"av01\0"))
            + _box(b"iprp", _box(b"ipco", properties) + _box(b"ipma", associations)),
        )

    start = _box(b"ftyp", b"avif\0\0\0\0avifmif1miaf")
    return b"".join([start, meta(len(start) + len(meta(0)) + 8), struct.pack(">L", 8 + size), b"mdat", *pieces])


def _box(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">L", 8 + len(content)) + kind + content


def _pieces(data: bytes, header: AvifHeader) -> list[memoryview]:
    view = memoryview(data)
    return [view[at : at + size] for at, size in header.extents]


def _boxes(data: bytes, start: int, end: int) -> Iterator[tuple[bytes, int, int]]:
    """Yield kind, start and end of the content of each box."""
    at = start
    for _ in range(_MAX_BOXES):
        if at + 8 > end:
            return
        size, kind = struct.unpack_from(">L4s", data, at)
        content = at + 8
        if size == 1:
            (size,) = struct.unpack_from(">Q", data, content)
            content += 8
        after = end if size == 0 else at + size
        if not content <= after <= end:
            raise InvalidImage("the AVIF is truncated, or its boxes do not fit into each other")
        yield kind, content, after
        at = after
    raise InvalidImage("the AVIF has too many boxes")


def _read(data: bytes) -> AvifHeader:
    # The image data may be incomplete, and what follows the boxes of a file does not matter.
    meta = next((place for kind, *place in _boxes(data, 0, len(data)) if kind == b"meta"), None)
    if meta is None:
        raise InvalidImage("the AVIF has no image, or is truncated")
    found = {kind: place for kind, *place in _boxes(data, meta[0] + 4, meta[1])}
    at = found[b"pitm"][0]
    (primary,) = struct.unpack_from(">L" if data[at] else ">H", data, at + 4)
    if (kind := _read_kind(data, found[b"iinf"], primary)) != b"av01":
        what = "is composed of tiles, which are" if kind == b"grid" else "has a primary image that is"
        raise UnsupportedFormat(f"the AVIF {what} not supported; send a plain AVIF, a PNG or a JPEG")
    within = found.get(b"idat", [0, 0])
    extents = _read_extents(data, found[b"iloc"], primary, within)
    properties = _read_properties(data, found[b"iprp"], primary)
    width, height = struct.unpack_from(">LL", properties[b"ispe"], 4)
    turns = properties.get(b"irot", b"\0")[0] & 3
    mirror = 0 if b"imir" not in properties else 1 + (properties[b"imir"][0] & 1)
    colours = properties.get(b"colr", b"")
    return AvifHeader(
        width,
        height,
        _ORIENTATIONS[mirror][turns],
        properties[b"av1C"][:4],
        colours if colours.startswith(b"nclx") and len(colours) == _NCLX_BYTES else b"",
        extents,
    )


def _read_kind(data: bytes, place: list[int], item: int) -> bytes:
    """Return the kind of an item."""
    start = place[0] + (8 if data[place[0]] else 6)
    for kind, at, _ in _boxes(data, start, place[1]):
        if kind == b"infe" and data[at] in _ITEM_LAYOUTS:
            number, _, name = struct.unpack_from(_ITEM_LAYOUTS[data[at]], data, at + 4)
            if number == item:
                return bytes(name)
    return b""


def _read_extents(data: bytes, place: list[int], item: int, within: list[int]) -> list[tuple[int, int]]:
    """Return where an item lies in the file."""
    at = place[0]
    version, sizes = data[at], int.from_bytes(data[at + 4 : at + 6])
    at += 6

    def number(nbytes: int) -> int:
        nonlocal at
        at += nbytes
        if at > place[1]:
            raise InvalidImage("the AVIF header cannot be read")
        return int.from_bytes(data[at - nbytes : at])

    identifier = 4 if version > 1 else 2
    for _ in range(min(number(identifier), _MAX_BOXES)):
        found = number(identifier)
        method = number(2) & 15 if version else 0
        number(2)
        base = number(sizes >> 4 & 15)
        count = number(2)
        if count > _MAX_EXTENTS:
            raise InvalidImage("the AVIF's image is in too many pieces")
        extents = []
        for _ in range(count):
            number(sizes & 15 if version else 0)
            extents.append((base + number(sizes >> 12), number(sizes >> 8 & 15)))
        if found == item:
            start, end = (0, len(data)) if method == 0 else within
            length = end - start
            if len(extents) == 1 and not extents[0][1]:  # up to the end
                extents = [(extents[0][0], length - extents[0][0])]
            if method > 1 or any(max(offset, offset + size) > length for offset, size in extents):
                raise InvalidImage("the AVIF is truncated")
            if any(size == 0 for _, size in extents) or sum(size for _, size in extents) > length:
                raise InvalidImage("the pieces of the AVIF's image are empty or overlap")
            return [(start + offset, size) for offset, size in extents]
    return []


def _read_properties(data: bytes, place: list[int], item: int) -> dict[bytes, bytes]:
    """Return the properties of an item by kind."""
    found = {kind: inner for kind, *inner in _boxes(data, *place)}
    properties = [(kind, data[start:end]) for kind, start, end in _boxes(data, *found[b"ipco"])]
    at = found[b"ipma"][0]
    version, is_wide = data[at], data[at + 3] & 1
    (entries,) = struct.unpack_from(">L", data, at + 4)
    at += 8
    for _ in range(min(entries, _MAX_BOXES)):
        number, count = struct.unpack_from(">LB" if version else ">HB", data, at)
        at += 5 if version else 3
        if number == item:
            width, mask = (2, 0x7FFF) if is_wide else (1, 0x7F)
            places = (int.from_bytes(data[at + n * width : at + (n + 1) * width]) & mask for n in range(count))
            chosen = [properties[place - 1] for place in places if place]
            return dict(reversed(chosen))  # the first of a kind counts
        at += count * (2 if is_wide else 1)
    return {}
