"""JPEG by libjpeg-turbo: the common case, without Pillow's copies and its parsing of every segment.

Unusual files (CMYK, anything libjpeg warns of) are left to Pillow; the functions here return None for them.
"""

import re
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from app.errors import InvalidImage, UnsupportedFormat

_EXIF = b"Exif\0\0"
_END, _START_OF_SCAN, _APP1 = 0xD9, 0xDA, 0xE1
# Frame types that a single scan can complete: baseline and extended sequential.
_SEQUENTIAL = 0xC0, 0xC1
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_DEPTH = 8
# What no decoder here reads. Source: ITU-T T.81, table B.1; JPEG LS: ITU-T T.87, C.1.1.
_UNSUPPORTED_FRAMES = {
    **dict.fromkeys((0xC3, 0xC7, 0xCB, 0xCF), "lossless"),
    **dict.fromkeys((0xC5, 0xC6, 0xCD, 0xCE), "hierarchical"),
    0xF7: "JPEG-LS",
}
_MAX_DEPTH = 16
_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD9)}
# What libjpeg takes for the next marker: between segments, and after the pixels of a scan.
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_MARKER_AFTER_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")

# Far beyond what cameras and programs write. Each costs a decoder some time, however small the image.
_MAX_MARKERS = 2000
_MAX_JUNK_BYTES = 200_000
# Each scan visits every pixel again; encoders write about ten.
_MAX_SCANS = 100
_TOO_MUCH = "the JPEG has too many segments, scans or bytes between them"


class JpegHeader(NamedTuple):
    """What a file tells before it is decoded."""

    exif: bytes
    """The EXIF block without its six-byte identifier; empty if there is none."""
    scans: int
    """How often a decoder will visit each pixel."""
    is_single_scan: bool
    """Whether the first scan holds the whole image; else libjpeg keeps the coefficients of all pixels in memory."""
    size: tuple[int, int] | None
    """Width and height in pixels, as stored; None for a file that Pillow should decode."""


def read_header(data: bytes) -> JpegHeader:
    """Go from marker to marker as libjpeg does; only through the header if the first scan holds the whole image.

    Raises:
        UnsupportedFormat: It is of a kind that cannot be decoded: lossless, hierarchical, or of more than 8 bits.
        InvalidImage: The file is crafted to exhaust CPU time.
    """
    exif, components, scans, is_single_scan = b"", -1, 0, False
    for marker, at in _iterate(data):
        if marker == _START_OF_SCAN:
            scans += 1
            is_single_scan = scans == 1 and data[at + 2] == components
            if is_single_scan:
                break
            if scans > _MAX_SCANS:
                raise InvalidImage(_TOO_MUCH)
        elif marker in _FRAMES or marker in _UNSUPPORTED_FRAMES:
            _check_frame(marker, data[at + 2])
            if marker in _SEQUENTIAL:
                components = data[at + 7]
        elif marker == _APP1 and not exif and data.startswith(_EXIF, at + 2):
            exif = data[at + 8 : at + int.from_bytes(data[at : at + 2])]
    try:
        height, width, space, _ = simplejpeg.decode_jpeg_header(data, strict=False)
    except (ValueError, KeyError):  # the latter for an unknown subsampling
        return JpegHeader(exif, scans, is_single_scan, None)
    return JpegHeader(exif, scans, is_single_scan, (width, height) if space in {"YCbCr", "Gray"} else None)


def _check_frame(marker: int, depth: int) -> None:
    """Tell a file that is fine but not supported from one that is corrupt."""
    kind = _UNSUPPORTED_FRAMES.get(marker)
    if kind is None and _DEPTH < depth <= _MAX_DEPTH:
        kind = f"{depth}-bit"
    if kind is not None:
        raise UnsupportedFormat(f"the image is a {kind} JPEG; send a baseline or progressive one of 8 bits, or a PNG")


def _iterate(data: bytes) -> Iterator[tuple[int, int]]:
    """Yield the marker of each segment and the position of its length, at least eight bytes before the end of the data."""
    pattern = _MARKER
    at, junk = 2, 0
    for _ in range(_MAX_MARKERS):
        end = len(data) if pattern is _MARKER_AFTER_SCAN else min(len(data), at + _MAX_JUNK_BYTES + 2)
        found = pattern.search(data, at, end)
        if pattern is _MARKER:
            junk += (found.start() if found else end) - at
        if junk > _MAX_JUNK_BYTES:
            break
        if found is None or data[found.end() - 1] == _END or found.end() + 8 > len(data):
            return
        at = found.end()
        marker = data[at - 1]
        if marker in _WITHOUT_LENGTH:
            continue
        yield marker, at
        if marker == _START_OF_SCAN:
            pattern = _MARKER_AFTER_SCAN
        at += max(2, int.from_bytes(data[at : at + 2]))
    raise InvalidImage(_TOO_MUCH)


def read_frame_size(data: bytes) -> tuple[int, int]:
    """Read width and height in pixels from the frame header, whatever the colours are; zeros if there is none before the pixels.

    Raises:
        InvalidImage: As `read_header` says.
    """
    for marker, at in _iterate(data):
        if marker == _START_OF_SCAN:  # a frame header behind it counts for nothing, and to find it takes long
            break
        if marker in _FRAMES:
            return int.from_bytes(data[at + 5 : at + 7]), int.from_bytes(data[at + 3 : at + 5])
    return 0, 0


def reduced_size(size: tuple[int, int], min_decode_size: tuple[int, int]) -> tuple[int, int]:
    """Return the smallest of full, half, quarter and eighth size that is large enough; all are width and height."""
    # libjpeg can also reduce to the other eighths, but not in fast code: five eighths take longer than the full size.
    sizes = ((-(-size[0] // k), -(-size[1] // k)) for k in (8, 4, 2))
    return next((s for s in sizes if s[0] >= min_decode_size[0] and s[1] >= min_decode_size[1]), size)


def decode(
    data: bytes, size: tuple[int, int], min_decode_size: tuple[int, int], out: NDArray[np.uint8] | None
) -> NDArray[np.uint8] | None:
    """Decode to RGB, at the size that `reduced_size` returns.

    Args:
        data: The file.
        size: Width and height, from `read_header`.
        min_decode_size: Width and height that are needed, as stored.
        out: UINT8 (height, width, 3) to decode into, if the image comes out at exactly this size.

    Returns:
        UINT8 (height, width, 3), `out` itself if it was used; None for a file that Pillow should decode.
    """
    width, height = reduced_size(size, min_decode_size)
    if out is not None and not (out.flags.c_contiguous and out.shape[:2] == (height, width)):
        out = None
    buffer = None if out is None else out.reshape(-1)
    try:
        pixels: NDArray[np.uint8] = simplejpeg.decode_jpeg(data, "RGB", min_height=height, min_width=width, buffer=buffer)
    except (ValueError, KeyError):  # the latter for an unknown subsampling
        return None
    return pixels if out is None else out
