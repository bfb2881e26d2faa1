"""Decode images to upright RGB pixels.

16-bit images are converted here, because Pillow would clip them to white. Alpha is dropped, as in the training of detectors.
"""

import zlib
from contextlib import closing
from io import BytesIO
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from app.errors import InvalidImage
from app.imaging import apart, exif, jpeg, tiff
from app.imaging.header import USUAL_BYTES, ImageHeader, PixelLimits, png_chunks

_JPEG = {"JPEG", "MPO"}
# Formats of which Pillow may get a copy of the file.
_REWRITTEN = {"PNG", "BMP"}
# Peak memory in bytes per pixel: of the array; with Pillow's own image; with libwebp's two canvases.
_ARRAY_BYTES = 3
_PILLOW_BYTES = 4 + _ARRAY_BYTES
_WEBP_BYTES = USUAL_BYTES
# Bytes per pixel of all coefficients of a JPEG with up to four components.
_COEFFICIENT_BYTES = 8
# Images up to this size are converted as a whole, which is faster than in bands.
_SMALL_PIXELS = 1 << 20
_BAND_PIXELS = 1 << 18


class Decoding(NamedTuple):
    """Estimated size and memory of decoding an image."""

    size: tuple[int, int]
    """Width and height of the decoded image or slightly more, in pixels, upright."""
    nbytes: int
    """Peak memory in bytes, without a small constant amount."""


def estimate_decoding(header: ImageHeader, min_decode_size: tuple[int, int]) -> Decoding:
    """Estimate what `decode` takes with the same arguments; nothing if `read_header` has decoded the image."""
    size = header.width, header.height
    pixels = header.width * header.height
    if header.decoded is not None:
        return Decoding(size, 0)
    if header.tiff is not None:
        return Decoding(size, pixels * tiff.PIXEL_BYTES + tiff.FILE_COPIES * len(header.data))
    if header.file is not None and header.file.format not in _JPEG:
        copied = len(header.data) if header.file.format in _REWRITTEN else 0
        return Decoding(size, pixels * (_WEBP_BYTES if header.file.format == "WEBP" else _PILLOW_BYTES) + copied)
    pixel_bytes = _ARRAY_BYTES * (1 if header.orientation == 1 else 2)
    if header.file is not None:
        min_decode_size = min_decode_size[0] + 1, min_decode_size[1] + 1  # Pillow rounds down where libjpeg rounds up
        pixel_bytes = _PILLOW_BYTES
    width, height = jpeg.reduced_size(size, min_decode_size)
    nbytes = width * height * pixel_bytes + (0 if header.is_single_scan else pixels * _COEFFICIENT_BYTES)
    return Decoding((width, height), nbytes + len(header.data))  # of a file with something wrong, a copy is decoded


def max_request_bytes(limits: PixelLimits, max_body_bytes: int) -> int:
    """Return the maximum memory in bytes for one request: its body, which may be one file, and an image within the limits."""
    jpeg_bytes = limits.jpeg * (_PILLOW_BYTES + _COEFFICIENT_BYTES)
    others = limits.non_jpeg * USUAL_BYTES + apart.FILE_COPIES * max_body_bytes
    return max_body_bytes + max(jpeg_bytes, others)


def decode(
    header: ImageHeader,
    min_decode_size: tuple[int, int],
    out: NDArray[np.uint8] | None = None,
    *,
    allows_truncated: bool = False,
) -> NDArray[np.uint8]:
    """Decode to UINT8 (height, width, 3) RGB, upright, of the true size or smaller; raise InvalidImage for corrupt data."""
    # A JPEG larger than `min_decode_size`, width and height, upright, may be decoded at a reduced size, many times faster.
    # One that is stored upright is decoded into `out` (height, width, 3), if it gets this size. `allows_truncated` makes grey what
    # is missing.
    size = header.width, header.height
    if header.orientation in exif.SIDEWAYS:
        size, min_decode_size = size[::-1], min_decode_size[::-1]
    pixels = None
    if header.decoded is not None:
        pixels = header.decoded
    elif header.tiff is not None:
        pixels = tiff.decode(header.data, header.tiff)
    elif header.file is None:
        out = out if header.orientation == 1 else None
        pixels = jpeg.decode(header.data, size, min_decode_size, out, allows_truncated=allows_truncated)
    if pixels is None:
        if not allows_truncated and (header.file is None or header.file.format in _JPEG):
            jpeg.require_whole(header.data)
        try:
            with closing(header.file or Image.open(BytesIO(header.data), formats=("JPEG",))) as file:
                if file.format in _JPEG:
                    file.draft(file.mode, min_decode_size)
                elif file.format == "PNG":
                    _check_png_pixels(header.data)
                file.load()
                pixels = _to_array(file)
        except Exception as error:  # Pillow's decoders raise anything on broken input
            raise InvalidImage("the image data is truncated or corrupt") from error
    return pixels if header.orientation == 1 else exif.turn_upright(pixels, header.orientation)


def _check_png_pixels(data: bytes) -> None:
    # Pillow ignores the checksums of pixels.
    view = memoryview(data)
    for kind, start, end in png_chunks(data):
        if kind == b"IDAT" and zlib.crc32(view[start - 4 : end]) != int.from_bytes(view[end : end + 4]):
            raise InvalidImage("the image data is truncated or corrupt")


def _to_array(file: Image.Image) -> NDArray[np.uint8]:
    # A large image is converted in bands, because intermediate copies would take more memory than the image.
    file.info.pop("transparency", None)  # convert() would warn about it
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
    if band.mode.startswith("I"):  # 16 bits per pixel; convert() would clip instead of scaling
        return Image.fromarray((np.asarray(band) >> 8).astype(np.uint8)).convert("RGB")
    return band if band.mode == "RGB" else band.convert("RGB")
