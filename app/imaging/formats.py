"""Identify the format of an image, and reject files that are crafted to exhaust CPU time or memory.

A decoding thread cannot be stopped, so files whose cost is out of proportion to their pixels are rejected before any
decoder sees them. The limits are far beyond what cameras and programs write. JPEG has its own, in `jpeg`.
"""

import re

from app.errors import InvalidImage, UnsupportedFormat

# The first bytes of the supported formats.
_MAGIC = {
    "JPEG": re.compile(rb"\xff\xd8\xff"),
    "PNG": re.compile(rb"\x89PNG\r\n\x1a\n"),
    "WEBP": re.compile(rb"RIFF.{4}WEBP", re.DOTALL),
    "GIF": re.compile(rb"GIF8"),
    "BMP": re.compile(rb"BM"),
    "AVIF": re.compile(rb".{4}ftyp(?:.{4}){0,15}?avi[fs]", re.DOTALL),  # among the compatible brands, at the latest
    "TIFF": re.compile(rb"II[*+]\0|MM\0[*+]"),
}
_HEIC = re.compile(rb".{4}ftyp(?:hei[cxms]|hev[cxms]|mif1|msf1)", re.DOTALL)
_JPEG_2000_OR_XL = re.compile(rb"\0\0\0\x0c(?:jP  |JXL )\r\n\x87\n|\xff\x4f\xff\x51|\xff\x0a")
# A decoder reads each chunk by itself, and chunks without pixels may be compressed. 50 MiB in chunks of 4 KiB are 12,800.
_MAX_PNG_PIXEL_CHUNKS = 20_000
_MAX_PNG_OTHER_CHUNKS = 100
_PNG_PIXEL_CHUNKS = {b"IDAT", b"fcTL", b"fdAT"}
# libwebp keeps a record of each chunk, of 30 bytes, while it reads the header. Each frame of an animation is one.
_MAX_WEBP_CHUNKS = 20_000
# Pillow joins the blocks of comments before the first frame in quadratic time.
_MAX_GIF_EXTENSION_BYTES = 1 << 20
_MAX_GIF_EXTENSION_BLOCKS = 10_000


def find_format(data: bytes) -> str | None:
    """Return the format by the first bytes alone: JPEG, PNG, WEBP, GIF, BMP, AVIF or TIFF; None if they are none of these."""
    return next((name for name, magic in _MAGIC.items() if magic.match(data)), None)


def identify(data: bytes) -> str:
    """Return the format, as `find_format` does.

    Raises:
        UnsupportedFormat: The bytes are none of these.
        InvalidImage: A PNG, WebP or GIF is crafted to exhaust CPU time or memory.
    """
    name = find_format(data)
    if name is None and _HEIC.match(data):
        raise UnsupportedFormat(
            'the image is a HEIC; convert it to JPEG, or let the phone take JPEGs: Settings, Camera, Formats, "Most Compatible"'
        )
    if name is None and _JPEG_2000_OR_XL.match(data):
        raise UnsupportedFormat("the image is a JPEG 2000 or JPEG XL, which is not supported; convert it to JPEG or PNG")
    if name is None:
        raise UnsupportedFormat(f"the data is not an image in a supported format ({', '.join(_MAGIC)})")
    if name == "PNG" and _has_too_many_png_chunks(data):
        raise InvalidImage("the PNG has too many chunks")
    if name == "WEBP" and _has_too_many_webp_chunks(data):
        raise InvalidImage("the WebP has too many chunks")
    if name == "GIF" and _has_too_many_extensions(data):
        raise InvalidImage("the GIF has too many bytes or blocks before its first frame")
    return name


def _has_too_many_png_chunks(data: bytes) -> bool:
    """Count the chunks of a PNG up to its end or the limits."""
    at = 8
    pixels = others = 0
    while at + 8 <= len(data) and pixels <= _MAX_PNG_PIXEL_CHUNKS and others <= _MAX_PNG_OTHER_CHUNKS:
        kind = data[at + 4 : at + 8]
        if kind == b"IEND":
            return False
        if kind in _PNG_PIXEL_CHUNKS:
            pixels += 1
        else:
            others += 1
        at += 12 + int.from_bytes(data[at : at + 4])
    return pixels > _MAX_PNG_PIXEL_CHUNKS or others > _MAX_PNG_OTHER_CHUNKS


def _has_too_many_webp_chunks(data: bytes) -> bool:
    """Walk the chunks of a WebP up to its end or the limit."""
    at = 12
    chunks = 0
    while at + 8 <= len(data) and chunks <= _MAX_WEBP_CHUNKS:
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + size + size % 2
        chunks += 1
    return chunks > _MAX_WEBP_CHUNKS


def _has_too_many_extensions(data: bytes) -> bool:
    """Walk a GIF's blocks up to its first frame, its end, or the limits."""
    at = 13
    if len(data) > at and data[10] & 0x80:  # a palette comes first
        at += 3 << ((data[10] & 7) + 1)
    limit = at + _MAX_GIF_EXTENSION_BYTES
    blocks = 0
    while data[at : at + 1] == b"!" and at <= limit and blocks <= _MAX_GIF_EXTENSION_BLOCKS:
        at += 2
        while at < len(data) and data[at] and at <= limit and blocks <= _MAX_GIF_EXTENSION_BLOCKS:
            at += data[at] + 1
            blocks += 1
        at += 1
        blocks += 1
    return at > limit or blocks > _MAX_GIF_EXTENSION_BLOCKS
