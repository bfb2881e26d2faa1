"""Bytes -> an upright RGB picture and its true size.

Nothing is decoded before the header has been checked. Modes without a faithful direct conversion
have their own (16-bit would clip to white), and alpha is dropped, as in the pictures detectors are trained on.
"""

import warnings
from io import BytesIO
from typing import NamedTuple

import numpy as np
import PIL
from PIL import ExifTags, Image

from app.errors import BrokenPicture, PictureSides, PictureTooLarge
from app.sniff import picture_format

MAX_SIDE = 16384
MAX_ASPECT = 100

# How to turn a picture that a camera stored with this EXIF orientation.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIDEWAYS = 5

# Our own limit is checked on the header, per request; Pillow's would only warn, and process-wide.
warnings.filterwarnings("ignore", category=Image.DecompressionBombWarning)
# What is odd about a caller's picture is told to the caller, if at all.
warnings.filterwarnings("ignore", category=UserWarning, module="PIL")


class Unread(NamedTuple):
    """A picture of which only the header has been read. One thread may use it, once."""

    file: Image.Image
    width: int
    """Pixels, upright."""
    height: int
    """Pixels, upright."""
    orientation: int
    """EXIF, 1 to 8."""


def is_simd() -> bool:
    """Tell whether pillow-simd is the Pillow in use."""
    return bool(PIL.__version__.partition(".post")[1])


def read_header(data: bytes, max_pixels: int) -> Unread:
    """Look at the header only: format, size, orientation.

    Raises:
        UnsupportedFormat: The bytes are no JPEG, PNG, WebP, BMP or GIF.
        PictureTooLarge: More than `max_pixels` pixels.
        PictureSides: A side is over `MAX_SIDE` pixels, or one is over `MAX_ASPECT` times the other.
        BrokenPicture: The header cannot be read, or the file is built to keep a decoder busy.
    """
    form = picture_format(data)
    try:
        file = Image.open(BytesIO(data), formats=(form,))
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise PictureTooLarge(f"the limit is {max_pixels / 1e6:g} megapixels") from error
    except Exception as error:  # Pillow's plugins raise anything on broken input: struct.error, SyntaxError, ValueError ...
        raise BrokenPicture(f"the {form} header cannot be read") from error
    width, height = file.size
    if width * height > max_pixels:
        raise PictureTooLarge(f"{width} x {height} pixels; the limit is {max_pixels / 1e6:g} megapixels")
    if max(width, height) > MAX_SIDE or max(width, height) > MAX_ASPECT * min(width, height):
        raise PictureSides(f"{width} x {height} pixels; the limits are {MAX_SIDE} pixels a side and {MAX_ASPECT} : 1")
    orientation = _orientation(file)
    if orientation >= _SIDEWAYS:
        width, height = height, width
    return Unread(file, width, height, orientation)


def decode(unread: Unread, at_least: tuple[int, int]) -> Image.Image:
    """Decode, turn upright and convert to RGB.

    Args:
        unread: From `read_header`.
        at_least: Width and height in pixels, upright, that the caller needs; a JPEG that is twice as
            large or more comes back smaller than it is stored, which is many times faster.

    Returns:
        Mode RGB, upright. Its size is the true size, or smaller as said above.

    Raises:
        BrokenPicture: The data is truncated or corrupt.
    """
    file = unread.file
    try:
        if file.format in {"JPEG", "MPO"}:
            file.draft(file.mode, at_least if unread.orientation < _SIDEWAYS else at_least[::-1])
        file.load()
        picture = _to_rgb(file)
    except Exception as error:  # as in read_header
        raise BrokenPicture(f"the {file.format} data is truncated or corrupt") from error
    turn = _TURNS.get(unread.orientation)
    return picture if turn is None else picture.transpose(turn)


def _orientation(file: Image.Image) -> int:
    """Read it from what the header holds; a PNG that has it behind its pixels is taken as stored."""
    data = file.info.get("exif")
    if not data:
        return 1
    exif = Image.Exif()
    try:
        exif.load(data)
        orientation = exif.get(ExifTags.Base.Orientation, 1)
    except Exception:  # noqa: BLE001 - a broken EXIF block says nothing about the picture; viewers show it as stored
        return 1
    return orientation if orientation in _TURNS else 1


def _to_rgb(file: Image.Image) -> Image.Image:
    if file.mode == "RGB":
        return file
    if file.mode.startswith("I"):  # 16 bits a pixel; convert() would clip instead of scaling
        return Image.fromarray((np.asarray(file) >> 8).astype(np.uint8)).convert("RGB")
    file.info.pop("transparency", None)  # else convert() warns, and blends nothing anyway
    return file.convert("RGB")
