"""Read the header of an encoded image: format, size and orientation, before anything is decoded.

A decoding thread cannot be stopped. So files that would take too much time or memory for their number of pixels are rejected
before decoding. Cameras and programs stay far below the limits. The limits of JPEGs are in `jpeg`.
"""

import re
import struct
import warnings
import zlib
from collections.abc import Callable, Iterator
from io import BytesIO
from math import prod
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import BmpImagePlugin, GifImagePlugin, Image, ImageFile, ImagePalette, JpegImagePlugin

from app.errors import ImageTooLarge, InvalidImage, InvalidImageDimensions, UnsupportedFormat
from app.imaging import apart, exif, heif, jpeg, tiff
from app.imaging.apart import DECODERS
from app.imaging.tiff import TiffHeader

MAX_SIDE = 16384
MAX_ASPECT = 100

# The first bytes of the supported formats. The brand of an AVIF may be one of the compatible brands.
_MAGIC = re.compile(
    rb"(?P<JPEG>\xff\xd8\xff)|(?P<PNG>\x89PNG\r\n\x1a\n)|(?P<WEBP>RIFF.{4}WEBP)|(?P<GIF>GIF8)|(?P<BMP>BM)"
    rb"|(?P<AVIF>.{4}ftyp(?:.{4}){0,15}?avi[fs])|(?P<HEIC>.{4}ftyp(?:hei[cxms]|hev[cxms]|mif1|msf1))|(?P<TIFF>II[*+]\0|MM\0[*+])",
    re.DOTALL,
)
_JPEG_2000_OR_XL = re.compile(rb"\0\0\0\x0c(?:jP  |JXL )\r\n\x87\n|\xff\x4f\xff\x51|\xff\x0a")
# Decoders read chunks one by one. 50 MiB are 12,800 chunks of 4 KiB.
_MAX_PNG_CHUNKS = 20_000
# The chunks that colours depend on. Others may be broken, which is not fatal (PNG, 13.2), or take long to decompress.
_PNG_CHUNKS = {b"IHDR", b"PLTE", b"IDAT"}
_MAX_EXIF_BYTES = 1 << 16
# libwebp keeps 30 bytes per chunk while it reads the header. Each frame of an animation is a chunk.
_MAX_WEBP_CHUNKS = 20_000
# Pillow joins the comment blocks before the first frame in quadratic time.
_MAX_GIF_EXTENSION_BYTES = 1 << 20
_MAX_GIF_EXTENSION_BLOCKS = 10_000
# A JPEG has at least two bits per block of 64 pixels, so a smaller file has at most four megapixels.
_SMALL_JPEG_BYTES = 1 << 14
# Maximum number of scans of a JPEG at the pixel limit; a smaller image may have more. Encoders write ten, and 18 for CMYK.
_MAX_FULL_SCANS = 18

# The palettes of greys that Pillow recognizes, by the mode that it makes of them; size of the header that has 16-bit sides.
_BMP_GREYS = {"1": (0, 255), "L": range(256)}
_OLD_BMP = 12
# Of 32 bits with masks, as the fields for both say; the masks of red, green and blue, and of alpha; sizes of headers.
_BMP_MASKED = struct.pack("<HL", 32, 3)
_BMP_RED_FIRST, _BMP_ALPHA = struct.pack("<3L", 0xFF, 0xFF00, 0xFF0000), struct.pack("<L", 0xFF000000)
_BMP_INFO, _BMP_INFO_ALPHA = 40, 56

# Per pixel, of what is no JPEG.
USUAL_BYTES = 16

_NO_JPEG = jpeg.JpegHeader(b"", 1, is_single_scan=True, size=None)
# `read_header` checks the limit of the settings, in place of Pillow's global limit.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# Warnings about a caller's image are not for the log.
warnings.filterwarnings("ignore", category=UserWarning, module="PIL")
# When Pillow opens a JPEG, it parses EXIF, MPF and Photoshop blocks, which may take long even if they are small.
for _marker in (0xFFE1, 0xFFE2, 0xFFED):
    JpegImagePlugin.MARKER[_marker] = ("APP", "", JpegImagePlugin.Skip)
# Pillow also allocates the disposal area of a GIF's first frame, which is only used for the second one.
GifImagePlugin.GifImageFile.disposal_method = property(lambda _: 0, lambda *_: None)  # type: ignore[assignment]


class PixelLimits(NamedTuple):
    """Maximum sizes of images, pixels."""

    jpeg: int
    """Limit for JPEGs, which can be decoded at a reduced size."""
    non_jpeg: int

    def of(self, name: str, data: bytes) -> int:
        """Return the limit for a file of a format: where a pixel takes twice the memory, half of the limit, and conversely."""
        if name == "JPEG":
            return self.jpeg
        if name not in apart.PIXEL_BYTES:
            return self.non_jpeg
        return min(self.non_jpeg * USUAL_BYTES // apart.pixel_bytes(name, data), max(self.jpeg, self.non_jpeg))


class ImageHeader(NamedTuple):
    """An image of which only the header has been read. It can be decoded once, in one thread."""

    data: bytes
    file: Image.Image | None
    """Opened by Pillow; otherwise None."""
    width: int
    height: int
    """Of the upright image, as the width; pixels."""
    orientation: int
    """EXIF, 1 to 8."""
    is_single_scan: bool = True
    """False for a JPEG whose coefficients libjpeg keeps in memory."""
    tiff: TiffHeader | None = None
    """Of a TIFF, which OpenCV decodes; otherwise None."""
    decoded: NDArray[np.uint8] | None = None
    """The image itself, not yet turned by `orientation`, if it is decoded in a process of its own; otherwise None."""


def count_pixels(data: bytes, limits: PixelLimits) -> int:
    """Return width x height by the header, within microseconds; 0 for a small JPEG, or what is not supported or above its limit."""
    found = _MAGIC.match(data)
    name = found and found.lastgroup
    if not name or (name == "JPEG" and len(data) < _SMALL_JPEG_BYTES):
        return 0
    try:
        width, height = _GLANCES[name](data)
    except (struct.error, InvalidImage):  # struct.error: the header is truncated
        return 0
    pixels = abs(width * height)
    return pixels if pixels <= limits.of(name, data) else 0


def is_decoded_apart(data: bytes) -> bool:
    """Return whether the image may be decoded in a process of its own, which may take long however small the image is."""
    found = _MAGIC.match(data)
    return found is not None and found.lastgroup in apart.PIXEL_BYTES


def read_header(data: bytes, limits: PixelLimits, reserve: Callable[[int], None] = lambda _: None) -> ImageHeader:
    """Read format, size and orientation; decode, after a call of `reserve` with its bytes, what a process of its own decodes."""
    # Raises UnsupportedFormat, ImageTooLarge, InvalidImageDimensions, InvalidImage also for a file that is crafted to exhaust CPU
    # time or memory, GatewayFull if this host cannot run another process.
    name = identify(data)
    max_pixels = limits.of(name, data)
    exif_block, scans, is_single_scan, size = jpeg.read_header(data) if name == "JPEG" else _NO_JPEG
    file = tags = decoded = None
    orientation = 1
    if name == "TIFF":
        tags = tiff.read_header(data)
        size, orientation = tags[:2], tags.orientation
    elif name in apart.PIXEL_BYTES:
        size = heif.find_size(data)
    if size is not None and (tags.is_decoded_apart if tags else name in apart.PIXEL_BYTES):
        _check_size(size, name, max_pixels)
        reserve(apart.decode_bytes(name, prod(size), data))
        decoded = DECODERS.decode(tiff.rewrite(data, tags) if tags else data, name)
        height, width = decoded.shape[:2]
        size = width, height
    if size is None:
        file = _open(data, name, max_pixels)
        size = file.size
        exif_block = exif_block or file.info.get("exif", b"")
    _check_size(size, name, max_pixels)
    width, height = size
    if scans > 1 and scans * width * height > _MAX_FULL_SCANS * limits.jpeg:
        raise InvalidImage("the JPEG has too many scans for its size")
    # An EXIF block after the pixels of a PNG is not read: such an image stays as stored.
    orientation = exif.read_orientation(exif_block) if exif_block else orientation
    if orientation in exif.SIDEWAYS:
        width, height = height, width
    return ImageHeader(data, file, width, height, orientation, is_single_scan, tags, decoded)


def _check_size(size: tuple[int, int], name: str, max_pixels: int) -> None:
    width, height = size
    if width * height > max_pixels:
        raise ImageTooLarge(f"{width} x {height} pixels; the limit is {max_pixels / 1e6:g} megapixels for {name}")
    if max(size) > MAX_SIDE or max(size) > MAX_ASPECT * min(size):
        raise InvalidImageDimensions(f"{width} x {height} pixels; the limits are {MAX_SIDE} pixels a side and {MAX_ASPECT} : 1")


def require_format(data: bytes, formats: str) -> None:
    """Raise as `identify`, or UnsupportedFormat for a format that is not in a comma-separated list."""
    name = identify(data)
    if name not in formats.replace(" ", "").split(","):
        raise UnsupportedFormat(f"the image is a {name}, which this model does not decode; send {formats}")


def identify(data: bytes) -> str:
    """Return the format, a group of `_MAGIC`; raise UnsupportedFormat, or InvalidImage for too many chunks."""
    found = _MAGIC.match(data)
    if found is None and _JPEG_2000_OR_XL.match(data):
        raise UnsupportedFormat("the image is a JPEG 2000 or JPEG XL, which is not supported; convert it to JPEG or PNG")
    if data.startswith(b"%PDF-"):
        raise UnsupportedFormat("the data is a PDF, not an image; send its pages as JPEG or PNG")
    if found is None:
        if data.startswith(b"--") and b"form-data" in data[:512].lower():
            raise UnsupportedFormat("the data is a form, not an image; let the HTTP client write its Content-Type")
        if data[:64].lstrip().startswith(b"{"):
            raise UnsupportedFormat("the data is JSON, not an image; send it with Content-Type: application/json")
        raise UnsupportedFormat(f"the data is not an image in a supported format ({', '.join(_MAGIC.groupindex)})")
    name = str(found.lastgroup)
    if name == "HEIC" and not apart.HAS_HEIC:
        raise UnsupportedFormat("the image is a HEIC, for which pi-heif must be installed: pip install 'nereid-gateway[heic]'")
    if name == "PNG" and _has_too_many_png_chunks(data):
        raise InvalidImage("the PNG has too many chunks")
    if name == "WEBP" and _has_too_many_webp_chunks(data):
        raise InvalidImage("the WebP has too many chunks")
    if name == "GIF" and _has_too_many_extensions(data):
        raise InvalidImage("the GIF has too many bytes or blocks before its first frame")
    return name


def _open(data: bytes, name: str, max_pixels: int) -> Image.Image:
    try:
        data = _REWRITTEN[name](data) if name in _REWRITTEN else data
        file = Image.open(BytesIO(data), formats=(name,))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise ImageTooLarge(f"the limit is {max_pixels / 1e6:g} megapixels for {name}") from error
    except Exception as error:  # Pillow's plugins raise anything on broken input: struct.error, SyntaxError, ValueError ...
        raise InvalidImage(f"the {name} header cannot be read") from error
    if any(tile.codec_name in Image.DECODERS for tile in file.tile):  # decoders in Python, which are slow
        raise UnsupportedFormat(f"the {name} is compressed in a way that is not supported")
    if name == "BMP" and file.mode in _BMP_GREYS:
        _restore_palette(file, data)
    return file


def _restore_palette(file: ImageFile.ImageFile, data: bytes) -> None:
    # Pillow takes indices into a palette of greys for pixels of one or eight bits, however many bits they have.
    file.palette = ImagePalette.raw("RGB", bytes(grey for grey in _BMP_GREYS[file.mode] for _ in range(3)))
    file._mode, raw_mode = BmpImagePlugin.BIT2MODE[data[24 if data[14] == _OLD_BMP else 28]]  # noqa: SLF001 - it cannot be set
    file.tile = [tile._replace(args=(raw_mode, *tile.args[1:])) for tile in file.tile]  # type: ignore[index]  # a raw mode first


def png_chunks(data: bytes) -> Iterator[tuple[bytes, int, int]]:
    """Iterate over the chunks of a PNG up to its end: their type, and where their content starts and should end."""
    at = 8
    while at + 8 <= len(data) and (kind := data[at + 4 : at + 8]) != b"IEND":
        end = at + 8 + int.from_bytes(data[at : at + 4])
        yield kind, at + 8, end
        at = end + 4


def _has_too_many_png_chunks(data: bytes) -> bool:
    return any(number >= _MAX_PNG_CHUNKS for number, _ in enumerate(png_chunks(data)))


def _without_extras(data: bytes) -> bytes:
    """Return a PNG with only the chunks that its colours and its orientation depend on; raise InvalidImage for another order."""
    view, behind = memoryview(data), 8
    parts, kinds = [view[:behind]], list[bytes]()
    for kind, start, end in png_chunks(data):
        behind = end + 4
        is_exif = kind == b"eXIf" and end - start <= _MAX_EXIF_BYTES
        if kind in _PNG_CHUNKS or (is_exif and zlib.crc32(view[start - 4 : end]) == int.from_bytes(view[end:behind])):
            parts.append(view[start - 8 : behind])
            kinds.append(kind)
    is_indexed = data[25:26] == b"\3"
    if data[12:16] != b"IHDR" or kinds.count(b"IHDR") > 1 or (is_indexed and b"PLTE" not in kinds[: kinds.index(b"IDAT")]):
        raise InvalidImage("the PNG's chunks are not in their order")
    return b"".join([*parts, view[behind : behind + 12]])


def _with_alpha(data: bytes) -> bytes:
    """Return a BMP with red in the low byte as one with alpha, which Pillow reads in this order; others as they are."""
    header, kind = struct.unpack_from("<L", data, 14)[0], data[28:34]
    if kind != _BMP_MASKED or data[54:66] != _BMP_RED_FIRST or not _BMP_INFO <= header <= len(data):
        return data
    view = memoryview(data)
    if header >= _BMP_INFO_ALPHA:
        return b"".join([view[:66], _BMP_ALPHA, view[70:]])
    offset = struct.pack("<L", struct.unpack_from("<L", data, 10)[0] + len(_BMP_ALPHA))
    return b"".join([view[:10], offset, struct.pack("<L", _BMP_INFO_ALPHA), view[18:66], _BMP_ALPHA, view[66:]])


def _has_too_many_webp_chunks(data: bytes) -> bool:
    at = 12
    chunks = 0
    while at + 8 <= len(data) and chunks <= _MAX_WEBP_CHUNKS:
        size = int.from_bytes(data[at + 4 : at + 8], "little")
        at += 8 + size + size % 2
        chunks += 1
    return chunks > _MAX_WEBP_CHUNKS


def _has_too_many_extensions(data: bytes) -> bool:
    at = 13
    if len(data) > at and data[10] & 0x80:  # a palette precedes the blocks
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
    if kind == b"VP8X":  # 24 bits each, minus one
        return int.from_bytes(data[24:27], "little") + 1, int.from_bytes(data[27:30], "little") + 1
    if kind == b"VP8L":  # 14 bits each, minus one
        (bits,) = struct.unpack_from("<I", data, 21)
        return (bits & 0x3FFF) + 1, (bits >> 14 & 0x3FFF) + 1
    if kind == b"VP8 ":  # 14 bits each, each followed by two bits of scaling
        width, height = struct.unpack_from("<HH", data, 26)
        return width & 0x3FFF, height & 0x3FFF
    return 0, 0


# Functions that read width and height only. A BMP that is stored from top to bottom has a negative height.
_GLANCES: dict[str, Callable[[bytes], tuple[int, int]]] = {
    "JPEG": jpeg.read_frame_size,
    "PNG": lambda data: struct.unpack_from(">II", data, 16),
    "WEBP": _read_webp_size,
    "GIF": lambda data: struct.unpack_from("<HH", data, 6),
    "BMP": lambda data: struct.unpack_from("<ii", data, 18),
    "AVIF": heif.find_size,
    "HEIC": heif.find_size,
    "TIFF": tiff.read_size,
}
# Files that Pillow gets in another form.
_REWRITTEN: dict[str, Callable[[bytes], bytes]] = {"PNG": _without_extras, "BMP": _with_alpha}
