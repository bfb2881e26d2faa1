"""Read the header of an encoded image: format, size and orientation, before anything is decoded.

A decoding thread cannot be stopped, so files whose cost is out of proportion to their pixels are rejected before any
decoder sees them. The limits are far beyond what cameras and programs write. JPEG has its own, in `jpeg`.
"""

import re
import struct
import warnings
from collections.abc import Callable
from io import BytesIO
from typing import NamedTuple

from PIL import GifImagePlugin, Image, JpegImagePlugin, PngImagePlugin

from app.errors import ImageTooLarge, InvalidImage, InvalidImageDimensions, UnsupportedFormat
from app.imaging import avif, exif, jpeg, opencv, tiff

MAX_SIDE = 16384
MAX_ASPECT = 100

# The first bytes of the supported formats; AVIF is among the compatible brands, at the latest.
_MAGIC = re.compile(
    rb"(?P<JPEG>\xff\xd8\xff)|(?P<PNG>\x89PNG\r\n\x1a\n)|(?P<WEBP>RIFF.{4}WEBP)|(?P<GIF>GIF8)|(?P<BMP>BM)"
    rb"|(?P<AVIF>.{4}ftyp(?:.{4}){0,15}?avi[fs])|(?P<TIFF>II[*+]\0|MM\0[*+])",
    re.DOTALL,
)
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
# A JPEG has at least two bits for each block of 64 pixels: with fewer bytes than this, four megapixels at the most.
_SMALL_JPEG_BYTES = 1 << 14
# Scans that a JPEG of the largest permitted size may have; a smaller one may have more. Encoders write ten, and 18 for CMYK.
_MAX_FULL_SCANS = 18

_NO_JPEG = jpeg.JpegHeader(b"", 1, is_single_scan=True, size=None)
# Our own limit is checked on the header, per request; Pillow's only warns, and for the whole process.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Oddities of a caller's image are reported to the caller, if at all.
warnings.filterwarnings("ignore", category=UserWarning, module="PIL")
# Pillow parses EXIF, MPF and Photoshop's blocks while it opens a JPEG, at a cost unrelated to their size.
for _marker in (0xFFE1, 0xFFE2, 0xFFED):
    JpegImagePlugin.MARKER[_marker] = ("APP", "", JpegImagePlugin.Skip)
# It also decompresses the texts and colour profiles of a PNG, and makes a list of any number of chromaticities.
for _chunk in ("tEXt", "zTXt", "iTXt", "iCCP", "cHRM"):
    delattr(PngImagePlugin.PngStream, f"chunk_{_chunk}")
# And it allocates what will cover a GIF's first frame before the next one, which is never read.
GifImagePlugin.GifImageFile.disposal_method = property(lambda _: 0, lambda *_: None)  # type: ignore[assignment]


class PixelLimits(NamedTuple):
    """Maximum sizes of images, pixels."""

    jpeg: int
    """Limit of JPEGs, which can be decoded at a reduced size."""
    non_jpeg: int

    def of(self, name: str) -> int:
        """Return the limit for a format: half for AVIF, a pixel of which takes several times the time and memory of others."""
        if name == "AVIF":
            return self.non_jpeg // 2
        return self.jpeg if name == "JPEG" else self.non_jpeg


class ImageHeader(NamedTuple):
    """An image of which only the header has been read. One thread may use it, once."""

    data: bytes
    file: Image.Image | None
    """Opened by Pillow; None for a JPEG that libjpeg-turbo reads by itself, and for what OpenCV reads."""
    width: int
    """Pixels, upright."""
    height: int
    """Pixels, upright."""
    orientation: int
    """EXIF, 1 to 8."""
    is_single_scan: bool = True
    """False for a JPEG of which libjpeg has to keep all coefficients in memory."""
    opencv_file: opencv.OpenCvFile | None = None
    """For OpenCV to decode: an AVIF or TIFF."""


def count_pixels(data: bytes, limits: PixelLimits) -> int:
    """Return width x height as an encoded image claims them, in microseconds and without checking anything else.

    Returns:
        0 for a small JPEG, and for an image that will be rejected.
    """
    found = _MAGIC.match(data)
    name = found and found.lastgroup
    if not name or (name == "JPEG" and len(data) < _SMALL_JPEG_BYTES):
        return 0
    try:
        width, height = _GLANCES[name](data)
    except (struct.error, InvalidImage):  # the former if it is truncated
        return 0
    pixels = abs(width * height)
    return pixels if pixels <= limits.of(name) else 0


def read_header(data: bytes, limits: PixelLimits) -> ImageHeader:
    """Read format, size and orientation.

    Raises:
        UnsupportedFormat: The bytes are not a JPEG, PNG, WebP, BMP, GIF, AVIF or TIFF, or of a kind of it that is not read.
        ImageTooLarge: More pixels than its format may have.
        InvalidImageDimensions: A side is over `MAX_SIDE` pixels, or one is over `MAX_ASPECT` times the other.
        InvalidImage: The header cannot be read, or the file is crafted to exhaust CPU time or memory.
    """
    name = identify(data)
    max_pixels = limits.of(name)
    exif_block, scans, is_single_scan, size = jpeg.read_header(data) if name == "JPEG" else _NO_JPEG
    file = opencv_file = None
    orientation = 1
    if name in opencv.FORMATS:
        opencv_file = opencv.open_file(data, name)
        size, orientation = opencv_file[:2], opencv_file.orientation
    if size is None:
        file = _open(data, name, max_pixels)
        size = file.size
        exif_block = exif_block or file.info.get("exif", b"")
    width, height = size
    if width * height > max_pixels:
        raise ImageTooLarge(f"{width} x {height} pixels; the limit is {max_pixels / 1e6:g} megapixels for {name}")
    if max(width, height) > MAX_SIDE or max(width, height) > MAX_ASPECT * min(width, height):
        raise InvalidImageDimensions(f"{width} x {height} pixels; the limits are {MAX_SIDE} pixels a side and {MAX_ASPECT} : 1")
    if scans > 1 and scans * width * height > _MAX_FULL_SCANS * limits.jpeg:
        raise InvalidImage("the JPEG has too many scans for its size")
    # A PNG may have its EXIF block behind the pixels, where it is not read: such an image is taken as stored.
    orientation = exif.read_orientation(exif_block) if exif_block else orientation
    if exif.is_sideways(orientation):
        width, height = height, width
    return ImageHeader(data, file, width, height, orientation, is_single_scan, opencv_file)


def identify(data: bytes) -> str:
    """Return the format by the first bytes: JPEG, PNG, WEBP, GIF, BMP, AVIF or TIFF.

    Raises:
        UnsupportedFormat: The bytes are none of these.
        InvalidImage: A PNG, WebP or GIF is crafted to exhaust CPU time or memory.
    """
    found = _MAGIC.match(data)
    if found is None and _HEIC.match(data):
        raise UnsupportedFormat(
            'the image is a HEIC; convert it to JPEG, or let the phone take JPEGs: Settings, Camera, Formats, "Most Compatible"'
        )
    if found is None and _JPEG_2000_OR_XL.match(data):
        raise UnsupportedFormat("the image is a JPEG 2000 or JPEG XL, which is not supported; convert it to JPEG or PNG")
    if found is None:
        raise UnsupportedFormat(f"the data is not an image in a supported format ({', '.join(_MAGIC.groupindex)})")
    name = str(found.lastgroup)
    if name == "PNG" and _has_too_many_png_chunks(data):
        raise InvalidImage("the PNG has too many chunks")
    if name == "WEBP" and _has_too_many_webp_chunks(data):
        raise InvalidImage("the WebP has too many chunks")
    if name == "GIF" and _has_too_many_extensions(data):
        raise InvalidImage("the GIF has too many bytes or blocks before its first frame")
    return name


def _open(data: bytes, name: str, max_pixels: int) -> Image.Image:
    try:
        file = Image.open(BytesIO(data), formats=(name,))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLarge(f"the limit is {max_pixels / 1e6:g} megapixels for {name}") from error
    except Exception as error:  # Pillow's plugins raise anything on broken input: struct.error, SyntaxError, ValueError ...
        raise InvalidImage(f"the {name} header cannot be read") from error
    if any(tile.codec_name in Image.DECODERS for tile in file.tile):  # those that are written in Python, not in C
        raise UnsupportedFormat(f"the {name} is compressed in a way that is not supported")
    return file


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


def _read_webp_size(data: bytes) -> tuple[int, int]:
    kind = data[12:16]
    if kind == b"VP8X":  # 24 bits each, less one
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":  # 14 bits each, less one
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":  # 14 bits each, then two of a scale
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0


# What is read of a file to count its pixels. A BMP may have a negative height: stored from top to bottom.
_GLANCES: dict[str, Callable[[bytes], tuple[int, int]]] = {
    "JPEG": jpeg.read_frame_size,
    "PNG": lambda data: struct.unpack_from(">II", data, 16),
    "WEBP": _read_webp_size,
    "GIF": lambda data: struct.unpack_from("<HH", data, 6),
    "BMP": lambda data: struct.unpack_from("<ii", data, 18),
    "AVIF": avif.find_size,
    "TIFF": tiff.read_size,
}
