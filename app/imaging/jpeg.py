"""Decode JPEGs with libjpeg-turbo, without Pillow's copies and its parsing of every segment.

Pillow decodes unusual files (CMYK, anything libjpeg warns about). The functions here return None for them.
"""

import re
import struct
from collections.abc import Container, Iterator
from contextlib import suppress
from itertools import takewhile
from typing import Any, NamedTuple

import numpy as np
import simplejpeg
from numpy.typing import NDArray

from app.errors import InvalidImage, UnsupportedFormat

_EXIF = b"Exif\0\0"
PROFILE = b"ICC_PROFILE\0"
_END, _START_OF_SCAN, _APP1 = 0xD9, 0xDA, 0xE1
# Frame types that a single scan can complete: baseline and extended sequential.
_SEQUENTIAL = 0xC0, 0xC1
_FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}
_COMPONENTS = 1, 3  # libjpeg-turbo converts no others to RGB
_DEPTH = 8
# Frame types that no decoder here supports. Source: ITU-T T.81, table B.1; JPEG LS: ITU-T T.87, C.1.1.
_UNSUPPORTED_FRAMES = {
    **dict.fromkeys((0xC3, 0xC7, 0xCB, 0xCF), "lossless"),
    **dict.fromkeys((0xC5, 0xC6, 0xCD, 0xCE), "hierarchical"),
    **dict.fromkeys((0xC9, 0xCA), "arithmetic-coded"),  # libjpeg does not notice that such a file is cut
    0xF7: "JPEG-LS",
}
_MAX_DEPTH = 16
_RESTART_INTERVAL = 0xDD
_WITHOUT_LENGTH = {0x01, *range(0xD0, 0xD9)}
_PREFIX, _NO_MARKER = 0xFF, (0x00, 0xFF)
_SEGMENT = struct.Struct(">BBH")
"""Prefix, marker and length."""
_PLAIN = {0xC4, 0xDB, 0xDD, 0xFE, 0xE0, *range(0xE2, 0xF0)}
"""Tables, comments and application data other than EXIF: most segments."""
_NEEDED = {0xC4, 0xDB, 0xDD, 0xE0, 0xEE, *_FRAMES}
"""Segments that a decoder needs: tables, the frame, and how colours are stored."""
# The next marker as libjpeg finds it: between segments, and after the pixels of a scan.
_MARKER = re.compile(rb"\xff[^\x00\xff]")
_MARKER_AFTER_SCAN = re.compile(rb"\xff[^\x00\xff\xd0-\xd7]")

# Far beyond what cameras and programs write. Markers and junk take time, however small the image is.
_MAX_MARKERS = 2000
_MAX_JUNK_BYTES = 200_000
# Each scan visits every pixel again; encoders write about ten.
_MAX_SCANS = 100
# What libjpeg says of a file that can be decoded, but perhaps not wholly. Source: jerror.h.
_JUNK = "extraneous bytes before marker"
_DAMAGES = "Premature end of JPEG file", _JUNK, "Corrupt JPEG data"
_END_MARKER = b"\xff\xd9"
_TOO_MUCH = "the JPEG has too many segments, scans or bytes between them"


class JpegHeader(NamedTuple):
    """Properties of a JPEG that are known before it is decoded."""

    exif: bytes
    """The EXIF block without its six-byte identifier; empty if there is none."""
    scans: int
    """How often a decoder visits each pixel."""
    is_single_scan: bool
    """Whether the first scan contains the whole image. Otherwise libjpeg keeps the coefficients of all pixels in memory."""
    size: tuple[int, int] | None
    """Width and height in pixels, as stored; None for a file that Pillow should decode."""


def read_header(data: bytes) -> JpegHeader:
    """Read the segments as libjpeg does, to the first scan if it has the whole image; raise UnsupportedFormat or InvalidImage."""
    exif, components, scans, is_single_scan, size = b"", -1, 0, False, (0, 0)
    for marker, at in _iterate(data):
        if marker == _START_OF_SCAN:
            scans += 1
            is_single_scan = scans == 1 and data[at + 2] == components
            if is_single_scan:
                break
            if scans > _MAX_SCANS:
                raise InvalidImage(_TOO_MUCH)
        elif marker in _FRAMES or marker in _UNSUPPORTED_FRAMES:
            depth = data[at + 2]
            kind = _UNSUPPORTED_FRAMES.get(marker, f"{depth}-bit" if _DEPTH < depth <= _MAX_DEPTH else None)
            if kind is not None:
                raise UnsupportedFormat(f"the image is a {kind} JPEG; send a baseline or progressive one of 8 bits, or a PNG")
            if size == (0, 0) and data[at + 7] in _COMPONENTS:
                size = _frame_size(data, at)
            if marker in _SEQUENTIAL:
                components = data[at + 7]
        elif marker == _APP1 and not exif and data.startswith(_EXIF, at + 2):
            exif = data[at + 8 : at + int.from_bytes(data[at : at + 2])]
    return JpegHeader(exif, scans, is_single_scan, size if all(size) else None)


def _iterate(data: bytes, plain: Container[int] = _PLAIN) -> Iterator[tuple[int, int]]:
    # At least eight bytes follow each position. Markers in `plain` are left out.
    at, junk, is_after_scan = 2, 0, False
    last = len(data) - 8
    for _ in range(_MAX_MARKERS):
        prefix, marker, length = _SEGMENT.unpack_from(data, at) if not is_after_scan and at + 2 <= last else (0, 0, 0)
        if prefix == _PREFIX and marker in plain:
            at += 2 + max(2, length)
            continue
        if prefix == _PREFIX and marker not in _NO_MARKER:
            at += 2
        else:
            pattern, end = (_MARKER_AFTER_SCAN, len(data)) if is_after_scan else (_MARKER, min(len(data), at + _MAX_JUNK_BYTES + 2))
            found = pattern.search(data, at, end)
            if not is_after_scan:
                junk += (found.start() if found else end) - at
            if junk > _MAX_JUNK_BYTES:
                break
            if found is None or found.end() > last:
                return
            at = found.end()
        marker = data[at - 1]
        if marker == _END:
            return
        if marker in _WITHOUT_LENGTH:
            continue
        yield marker, at
        if marker == _START_OF_SCAN:
            is_after_scan = True
        at += max(2, data[at] << 8 | data[at + 1])
    raise InvalidImage(_TOO_MUCH)


def read_profile(data: bytes) -> bytes:
    """Return the colour profile (ICC.1, B.4) before the pixels, of the segments that are there; empty if there are none."""
    at, parts = 2, dict[int, bytes]()
    while data[at : at + 1] == b"\xff" and (marker := data[at + 1 : at + 2]) not in {b"\xda", b""}:
        end = at + 2 + int.from_bytes(data[at + 2 : at + 4])
        if marker == b"\xe2" and data.startswith(PROFILE, at + 4):
            parts.setdefault(data[at + 16], data[at + 18 : end])  # behind its number is their count
        at = end
    return b"".join(parts[number] for number in sorted(parts))


def read_frame_size(data: bytes) -> tuple[int, int]:
    """Return width and height by the frame header, zeros if the pixels come first; raise InvalidImage for too many segments."""
    for marker, at in _iterate(data):
        if marker in _FRAMES:
            return _frame_size(data, at)
        if marker == _START_OF_SCAN:  # a later frame header does not count, and finding it would take long
            break
    return 0, 0


def _frame_size(data: bytes, at: int) -> tuple[int, int]:
    return data[at + 5] << 8 | data[at + 6], data[at + 3] << 8 | data[at + 4]


def reduced_size(size: tuple[int, int], min_decode_size: tuple[int, int]) -> tuple[int, int]:
    """Return the smallest of full, half, quarter and eighth size that is not below the minimum; sizes are width and height."""
    # libjpeg has no fast code for the other eighths: five eighths take longer than the full size.
    for k in (8, 4, 2):
        width, height = -(-size[0] // k), -(-size[1] // k)
        if width >= min_decode_size[0] and height >= min_decode_size[1]:
            return width, height
    return size


def decode(
    data: bytes,
    size: tuple[int, int],
    min_decode_size: tuple[int, int],
    out: NDArray[np.uint8] | None,
    *,
    allows_truncated: bool = False,
) -> NDArray[np.uint8] | None:
    """Decode to RGB, at the size that `reduced_size` returns; None for a file that Pillow should decode. Sizes are as stored."""
    # UINT8 `out` (height, width, 3) is decoded into, and returned, if it is contiguous and of exactly the decoded size. Raises
    # InvalidImage if pixels are missing; a file may lack the marker of its end, and have bytes that mean nothing.
    width, height = reduced_size(size, min_decode_size)
    if out is not None and not (out.flags.c_contiguous and out.shape[:2] == (height, width)):
        out = None
    try:
        wanted = {"min_height": height, "min_width": width, "buffer": out}
        pixels = simplejpeg.decode_jpeg(data, "RGB", strict=False, **wanted) if allows_truncated else _decode(data, "RGB", **wanted)
    except (ValueError, KeyError):  # KeyError: unknown subsampling
        return None
    return pixels if out is None else out


def require_whole(data: bytes) -> None:
    """Raise InvalidImage as `decode` does, for a file that Pillow decodes, because it ignores what is missing."""
    with suppress(ValueError, KeyError):  # what is wrong otherwise, Pillow finds
        _decode(data, "CMYK", min_height=1, min_width=1)


def _decode(data: bytes, colors: str, **wanted: Any) -> NDArray[np.uint8]:  # noqa: ANN401 - simplejpeg's options
    try:
        return simplejpeg.decode_jpeg(data, colors, **wanted)  # type: ignore[no-any-return]
    except ValueError as error:
        if not any(damage in str(error) for damage in _DAMAGES):
            raise
    # What is wrong may be a part that no decoder needs. Of each file, libjpeg says only what it finds first.
    data = _without_extras(data)
    try:
        return simplejpeg.decode_jpeg(data, colors, **wanted)  # type: ignore[no-any-return]
    except ValueError as error:
        # Bytes that mean nothing behind the pixels. Before another scan or a restart, they stand where pixels should be.
        is_behind = f"{_JUNK} 0xd9" in str(error) or (read_header(data).is_single_scan and not _has_restarts(data))
        if _JUNK in str(error) and is_behind:
            return simplejpeg.decode_jpeg(data, colors, strict=False, **wanted)  # type: ignore[no-any-return]
        raise InvalidImage("the image data is truncated or corrupt") from error


def _has_restarts(data: bytes) -> bool:
    markers = (marker for marker, _ in _iterate(data, ()))
    return _RESTART_INTERVAL in takewhile(lambda marker: marker != _START_OF_SCAN, markers)


def _without_extras(data: bytes) -> bytes:
    """Return a file without application data, comments, and what stands between its segments before the pixels; with an end."""
    view = memoryview(data)
    parts, end = [view[:2]], b"" if data.rfind(_END_MARKER) >= 0 else _END_MARKER
    for marker, at in _iterate(data, ()):
        if marker == _START_OF_SCAN:
            return b"".join([*parts, view[at - 2 :], end])
        if marker in _NEEDED:
            parts.append(view[at - 2 : at + int.from_bytes(view[at : at + 2])])
    return data
