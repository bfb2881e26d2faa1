"""Decode images to upright RGB pixels.

Modes that Pillow cannot convert faithfully have a conversion of their own (16 bits would clip to white), and alpha is
dropped, as in the images that detectors are trained on.
"""

from contextlib import closing
from io import BytesIO
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from app.errors import InvalidImage
from app.imaging import exif, jpeg, opencv
from app.imaging.header import ImageHeader, PixelLimits

_JPEG = {"JPEG", "MPO"}
# Memory at the peak, bytes a pixel: libjpeg-turbo has no image of its own, unlike Pillow, and libwebp has two canvases.
_ARRAY_BYTES = 3
_PILLOW_BYTES = 4 + _ARRAY_BYTES
_WEBP_BYTES = 16
# Of a file that is written anew for OpenCV.
_FILE_COPIES = 2
# Of all coefficients of a JPEG, which has up to four components.
_COEFFICIENT_BYTES = 8
# Up to this size an image is converted at once, which is faster.
_SMALL_PIXELS = 1 << 20
_BAND_PIXELS = 1 << 18


class Decoding(NamedTuple):
    """What decoding an image takes."""

    size: tuple[int, int]
    """Width and height, upright, at which it is decoded, or a little more."""
    nbytes: int
    """Memory at its peak, bytes, as estimated; a little is needed besides, whatever the size."""


def estimate_decoding(header: ImageHeader, min_decode_size: tuple[int, int]) -> Decoding:
    """Estimate what `decode` takes for the same arguments."""
    size = header.width, header.height
    pixels = header.width * header.height
    if header.opencv_file is not None:
        return Decoding(size, pixels * header.opencv_file.pixel_bytes + _FILE_COPIES * len(header.data))
    if header.file is not None and header.file.format not in _JPEG:
        return Decoding(size, pixels * (_WEBP_BYTES if header.file.format == "WEBP" else _PILLOW_BYTES))
    pixel_bytes = _ARRAY_BYTES * (1 if header.orientation == 1 else 2)
    if header.file is not None:
        min_decode_size = min_decode_size[0] + 1, min_decode_size[1] + 1  # Pillow rounds down where libjpeg rounds up
        pixel_bytes = _PILLOW_BYTES
    width, height = jpeg.reduced_size(size, min_decode_size)
    nbytes = width * height * pixel_bytes + (0 if header.is_single_scan else pixels * _COEFFICIENT_BYTES)
    return Decoding((width, height), nbytes)


def max_decode_bytes(limits: PixelLimits, max_file_bytes: int) -> int:
    """Return the most memory that `estimate_decoding` returns for an image within the limits, in a file of so many bytes."""
    by_opencv = (limits.of(name) * pixel_bytes for name, pixel_bytes in opencv.PIXEL_BYTES.items())
    return max(
        limits.jpeg * (_PILLOW_BYTES + _COEFFICIENT_BYTES),
        limits.non_jpeg * _WEBP_BYTES,
        max(by_opencv) + _FILE_COPIES * max_file_bytes,
    )


def decode(header: ImageHeader, min_decode_size: tuple[int, int], out: NDArray[np.uint8] | None = None) -> NDArray[np.uint8]:
    """Decode, convert to RGB and turn upright.

    Args:
        header: From `read_header`.
        min_decode_size: Width and height in pixels, upright, that the caller needs. A larger JPEG may be decoded at a
            reduced size, but not below this one, which is many times faster.
        out: Where to put the pixels if they come out at exactly its size and upright.

    Returns:
        UINT8 (height, width, 3) RGB, upright, of the true size or smaller; `out` itself if it was used.

    Raises:
        InvalidImage: The data is truncated or corrupt.
    """
    size = header.width, header.height
    if exif.is_sideways(header.orientation):
        size, min_decode_size = size[::-1], min_decode_size[::-1]
    pixels = None
    if header.opencv_file is not None:
        pixels = opencv.decode(header.opencv_file)
    elif header.file is None:
        pixels = jpeg.decode(header.data, size, min_decode_size, out if header.orientation == 1 else None)
    if pixels is None:
        try:
            with closing(header.file or Image.open(BytesIO(header.data), formats=("JPEG",))) as file:
                if file.format in _JPEG:
                    file.draft(file.mode, min_decode_size)
                file.load()
                pixels = _to_array(file)
        except Exception as error:  # Pillow's decoders raise anything on broken input
            raise InvalidImage("the image data is truncated or corrupt") from error
    return pixels if header.orientation == 1 else exif.turn_upright(pixels, header.orientation)


def _to_array(file: Image.Image) -> NDArray[np.uint8]:
    """Copy a loaded image; a large one in bands, because whole copies in between would take more memory than it does."""
    file.info.pop("transparency", None)  # convert() would warn of it, and does not blend anyway
    width, height = file.size
    if width * height <= _SMALL_PIXELS:
        return np.asarray(_to_rgb(file))
    pixels = np.empty((height, width, 3), np.uint8)
    rows = max(1, _BAND_PIXELS // width)
    for top in range(0, height, rows):
        bottom = min(top + rows, height)
        pixels[top:bottom] = np.asarray(_to_rgb(file.crop((0, top, width, bottom))))
    return pixels


def _to_rgb(band: Image.Image) -> Image.Image:
    if band.mode.startswith("I"):  # 16 bits a pixel; convert() would clip instead of scaling
        return Image.fromarray((np.asarray(band) >> 8).astype(np.uint8)).convert("RGB")
    return band if band.mode == "RGB" else band.convert("RGB")
