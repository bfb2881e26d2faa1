"""Bytes -> upright RGB pixels and the picture's true size.

Nothing is decoded before the header has been checked. Modes without a faithful direct conversion
have their own (16-bit would clip to white), and alpha is dropped, as in the pictures detectors are trained on.
"""

import struct
import warnings
from collections.abc import Callable
from io import BytesIO
from typing import NamedTuple

import numpy as np
import PIL
from numpy.typing import NDArray
from PIL import ExifTags, Image, JpegImagePlugin

from app import jpeg
from app.errors import BrokenPicture, PictureSides, PictureTooLarge
from app.sniff import picture_format

MAX_SIDE = 16384
MAX_ASPECT = 100

# How to turn pixels (height, width, 3) that a camera stored with this EXIF orientation.
_TURNS: dict[int, Callable[[NDArray[np.uint8]], NDArray[np.uint8]]] = {
    2: lambda pixels: pixels[:, ::-1],
    3: lambda pixels: pixels[::-1, ::-1],
    4: lambda pixels: pixels[::-1],
    5: lambda pixels: pixels.transpose(1, 0, 2),
    6: lambda pixels: np.rot90(pixels, -1),
    7: lambda pixels: pixels[::-1, ::-1].transpose(1, 0, 2),
    8: np.rot90,
}
_SIDEWAYS = 5
_SHORT = 3
_QUICK_BYTES = 1 << 20
# Pixels of all scans of a JPEG together: thirty scans of fifty megapixels.
_MAX_SCANNED = 1_500_000_000

# Our own limit is checked on the header, per request; Pillow's would only warn, and process-wide.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# What is odd about a caller's picture is told to the caller, if at all.
warnings.filterwarnings("ignore", category=UserWarning, module="PIL")
# Pillow parses EXIF, MPF and Photoshop's blocks while it opens a JPEG, at a cost that has nothing to do with their size;
# see `_orientation`.
for _marker in (0xFFE1, 0xFFE2, 0xFFED):
    JpegImagePlugin.MARKER[_marker] = ("APP", "", JpegImagePlugin.Skip)


class Unread(NamedTuple):
    """A picture of which only the header has been read. One thread may use it, once."""

    data: bytes
    file: Image.Image | None
    """Pillow's, open; None for a JPEG that libjpeg-turbo reads by itself."""
    width: int
    """Pixels, upright."""
    height: int
    """Pixels, upright."""
    orientation: int
    """EXIF, 1 to 8."""


def is_simd() -> bool:
    """Tell whether pillow-simd is the Pillow in use."""
    return bool(PIL.__version__.partition(".post")[1])


def has_quick_header(data: bytes) -> bool:
    """Tell whether `read_header` takes next to no time, whatever the file holds. The other formats are Pillow's."""
    return len(data) <= _QUICK_BYTES and data.startswith(b"\xff\xd8\xff")


def read_header(data: bytes, max_pixels: int) -> Unread:
    """Look at the header only: format, size, orientation.

    Raises:
        UnsupportedFormat: The bytes are no JPEG, PNG, WebP, BMP or GIF.
        PictureTooLarge: More than `max_pixels` pixels.
        PictureSides: A side is over `MAX_SIDE` pixels, or one is over `MAX_ASPECT` times the other.
        BrokenPicture: The header cannot be read, or the file is built to keep a decoder busy.
    """
    form = picture_format(data)
    is_jpeg = form == "JPEG"
    exif, scans = jpeg.walk(data) if is_jpeg else (b"", 1)
    size = jpeg.read_size(data) if is_jpeg else None
    file = None
    if size is None:
        file = _opened(data, form, max_pixels)
        size = file.size
        exif = exif or file.info.get("exif", b"")
    width, height = size
    if width * height > max_pixels:
        raise PictureTooLarge(f"{width} x {height} pixels; the limit is {max_pixels / 1e6:g} megapixels")
    if max(width, height) > MAX_SIDE or max(width, height) > MAX_ASPECT * min(width, height):
        raise PictureSides(f"{width} x {height} pixels; the limits are {MAX_SIDE} pixels a side and {MAX_ASPECT} : 1")
    if scans * width * height > _MAX_SCANNED:
        raise BrokenPicture("the JPEG has too many scans for its size")
    orientation = _orientation(exif)
    if orientation >= _SIDEWAYS:
        width, height = height, width
    return Unread(data, file, width, height, orientation)


def decode(unread: Unread, at_least: tuple[int, int], into: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Decode, convert to RGB and turn upright.

    Args:
        unread: From `read_header`.
        at_least: Width and height in pixels, upright, that the caller needs; a JPEG that is larger may
            come back smaller than it is stored, but not below them, which is many times faster.
        into: Where to put the pixels, if they come out at exactly its size and need no turn.

    Returns:
        UINT8 (height, width, 3) RGB, upright: `into` itself, or an array of the true size or smaller.

    Raises:
        BrokenPicture: The data is truncated or corrupt.
    """
    size = unread.width, unread.height
    if unread.orientation >= _SIDEWAYS:
        size, at_least = size[::-1], at_least[::-1]
    pixels = None
    if unread.file is None:
        pixels = jpeg.decode(unread.data, size, at_least, into if unread.orientation == 1 else None)
    if pixels is None:
        try:
            file = unread.file or Image.open(BytesIO(unread.data), formats=("JPEG",))
            if file.format in {"JPEG", "MPO"}:
                file.draft(file.mode, at_least)
            file.load()
            pixels = np.asarray(_to_rgb(file))
        except Exception as error:  # as in _opened
            raise BrokenPicture("the picture's data is truncated or corrupt") from error
    turn = _TURNS.get(unread.orientation)
    return pixels if turn is None else np.ascontiguousarray(turn(pixels))


def _opened(data: bytes, form: str, max_pixels: int) -> Image.Image:
    try:
        return Image.open(BytesIO(data), formats=(form,))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureTooLarge(f"the limit is {max_pixels / 1e6:g} megapixels") from error
    except Exception as error:  # Pillow's plugins raise anything on broken input: struct.error, SyntaxError, ValueError ...
        raise BrokenPicture(f"the {form} header cannot be read") from error


def _orientation(exif: bytes) -> int:
    """Read it from an EXIF block that the header holds; a PNG that has it behind its pixels is taken as stored.

    Pillow would copy the data of every tag, which in a small hostile block are gigabytes.
    Source: CIPA DC-008 (EXIF), 4.6.2; TIFF 6.0, section 2.
    """
    exif = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return 1
    try:
        (at,) = struct.unpack_from(order + "L", exif, 4)
        (tags,) = struct.unpack_from(order + "H", exif, at)
        for entry in range(at + 2, at + 2 + 12 * tags, 12):
            tag, kind, _, value = struct.unpack_from(order + "HHLH", exif, entry)
            if tag == ExifTags.Base.Orientation:
                return value if kind == _SHORT and value in _TURNS else 1
    except struct.error:  # a broken block says nothing about the picture; viewers show it as stored
        pass
    return 1


def _to_rgb(file: Image.Image) -> Image.Image:
    if file.mode == "RGB":
        return file
    if file.mode.startswith("I"):  # 16 bits a pixel; convert() would clip instead of scaling
        return Image.fromarray((np.asarray(file) >> 8).astype(np.uint8)).convert("RGB")
    file.info.pop("transparency", None)  # else convert() warns, and blends nothing anyway
    return file.convert("RGB")
