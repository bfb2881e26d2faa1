"""Images for tests: flat blocks, noise, files of every format, and headers written by hand."""

import struct
import zlib
from io import BytesIO
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image

from app.imaging.decode import decode
from app.imaging.fit import Fit
from app.imaging.header import PixelLimits, read_header
from app.imaging.transform import ImageTransform
from tests.support import IMAGES

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF", "AVIF", "TIFF")
MEGA = 10**6
GREY, RGB, RGBA = 0, 2, 6
"""Colour types of a PNG."""
# 32 x 16 pixels in blocks of different colours, which JPEG preserves, and which show any rotation or mirroring.
BLOCKS = np.random.default_rng(1).permutation(np.linspace(0, 255, 24)).astype(np.uint8).reshape(2, 4, 3)
PIXELS = BLOCKS.repeat(8, axis=0).repeat(8, axis=1)
# The same blocks, stored sideways: a grid of one tile that is larger than the image, with `irot`; an AV1 frame, with `irot`.
HEIC, AVIF = ((IMAGES / f"blocks.{kind}").read_bytes() for kind in ("heic", "avif"))
NOISE = Image.fromarray(np.random.default_rng(2).integers(0, 256, (48, 64, 3), np.uint8))

_BEST: dict[str, dict[str, Any]] = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}


def limits(pixels: int) -> PixelLimits:
    return PixelLimits(pixels, pixels)


def pixels_of(data: bytes, most: int = 2 * MEGA) -> NDArray[np.uint8]:
    header = read_header(data, limits(most))
    return decode(header, (header.width, header.height))


def to_rgb(grey: Any) -> NDArray[np.uint8]:  # noqa: ANN401
    return np.stack([np.asarray(grey, np.uint8)] * 3, axis=-1)


def gradient(width: int, height: int) -> NDArray[np.uint8]:
    """Make an image whose red and green are the position of the column and of the row, from 0 to 250, at every size."""
    pixels = np.full((height, width, 3), 99, np.uint8)
    pixels[:, :, 0] = np.linspace(0, 250, width)
    pixels[:, :, 1] = np.linspace(0, 250, height)[:, None]
    return pixels


def draw(data: bytes, fit: Fit, canvas: NDArray[np.uint8], pixels: int = 10**8) -> ImageTransform:
    """Decode an image, and draw it on a canvas as the gateway does."""
    header = read_header(data, limits(pixels))
    transform = fit.fit(header.width, header.height)
    fit.draw(decode(header, transform.min_decode_size, transform.area(canvas)), transform, canvas)
    return transform


def encode(image: Image.Image, image_format: str, **options: Any) -> bytes:  # noqa: ANN401
    """Encode an image with as little loss as its format allows."""
    if image_format == "AVIF":  # which pillow-simd does not write
        pixels = np.asarray(image.convert("RGB"))[:, :, ::-1]
        return cv2.imencode(".avif", pixels, [cv2.IMWRITE_AVIF_QUALITY, 100, cv2.IMWRITE_AVIF_SPEED, 9])[1].tobytes()
    file = BytesIO()
    image.save(file, image_format, **{**_BEST.get(image_format, {}), **options})
    return file.getvalue()


def made_profile(mode: str) -> bytes:
    """Make a colour profile that tells only its size and its colours, of two segments of a JPEG. Source: ICC.1, 7.2."""
    content = bytes(range(12)) + {"RGB": b"RGB ", "L": b"GRAY"}[mode] + bytes(70_000)
    return (4 + len(content)).to_bytes(4) + content


def with_property(data: bytes, properties: int, kind: bytes, content: bytes) -> bytes:
    """Put a property in front of the rotation, which is the last of the properties of `AVIF` or `HEIC`.

    Source: ISO/IEC 14496-12, 12.1.4; ISO/IEC 23008-12, 9.3.
    """
    box = struct.pack(">L4s", 8 + len(content), kind) + content
    made = bytearray(data)
    ipma = data.index(b"ipma") - 4
    end = ipma + int.from_bytes(data[ipma : ipma + 4])
    moved = data.index((data.index(b"mdat") - 6).to_bytes(4))  # where `iloc` says that the data is
    for at, growth in (
        (data.index(b"meta") - 4, len(box) + 1),
        (moved, len(box) + 1),
        (data.index(b"iprp") - 4, len(box) + 1),
        (data.index(b"ipco") - 4, len(box)),
        (ipma, 1),
    ):
        made[at : at + 4] = (int.from_bytes(made[at : at + 4]) + growth).to_bytes(4)
    made[end - properties - 1] += 1
    made[end:end] = bytes([made[end - 1] + 1])
    rotation = data.index(b"irot") - 4
    made[rotation:rotation] = box
    return bytes(made)


def store(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Turn upright pixels to the position in which a camera stores them with this EXIF orientation."""
    stored: dict[int, NDArray[np.uint8]] = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, 1),
        7: pixels[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(pixels, -1),
    }
    return np.ascontiguousarray(stored[orientation])


def exif_of(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def hostile_tags() -> bytes:
    """Make a TIFF block of thousands of tags, each of which claims the whole block as its data."""
    tags, size = 4900, 64_000
    entries = b"".join(struct.pack("<HHLL", 1000 + number, 7, size - 100, 8) for number in range(tags))
    return b"II*\0" + struct.pack("<LH", 8, tags) + entries + bytes(size - len(entries) - 10)


def png(width: int, height: int, depth: int, colour: int, data: bytes = b"") -> bytes:
    """Write a PNG by hand; without data, the header is valid and there are no pixels."""
    lines = [b"\0" + data[i : i + len(data) // height] for i in range(0, len(data), len(data) // height)] if data else []
    header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + png_chunk(b"IDAT", zlib.compress(b"".join(lines), 1)) + png_chunk(b"IEND")


def png_chunk(kind: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
