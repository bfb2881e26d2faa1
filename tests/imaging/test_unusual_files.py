"""Files that cameras and programs write, and other decoders read: what no decoder needs may be broken, or in another place."""

import struct

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.errors import GatewayError, InvalidImage
from tests.imaging.samples import AVIF, HEIC, MEGA, PIXELS, encode, pixels_of, png_chunk
from tests.support import SHARED

BLOCKS = Image.fromarray(PIXELS)
JPEG, PNG, BMP = (encode(BLOCKS, name) for name in ("JPEG", "PNG", "BMP"))
PROGRESSIVE = encode(BLOCKS, "JPEG", progressive=True)
TABLE = JPEG.index(b"\xff\xdb")
SECOND_SCAN = PROGRESSIVE.index(b"\xff\xc4", PROGRESSIVE.index(b"\xff\xda"))
PROFILE = b"\xff\xe2\0\x14ICC_PROFILE\0\1\1abcd"
PHYSICAL = png_chunk(b"pHYs", struct.pack(">LLB", 1, 1, 0))


def meta_at_the_end(data: bytes) -> bytes:
    """Put the description of `AVIF` or `HEIC` behind the pixels, as phones do."""
    meta, pixels = data.index(b"meta") - 4, data.index(b"mdat") - 4
    offset = pixels - 2  # of the data by `iloc`, which counts from there
    described = data[meta:pixels].replace(offset.to_bytes(4), (offset - (pixels - meta)).to_bytes(4))
    return data[:meta] + data[pixels:] + described


def red_first(data: bytes) -> bytes:
    """Store the pixels of a BMP as 32 bits with red in the low byte, without a mask for alpha."""
    pixels = np.dstack([PIXELS[::-1], np.zeros(PIXELS.shape[:2], np.uint8)]).tobytes()
    header = struct.pack("<LiiHHL", 40, 32, 16, 1, 32, 3) + data[34:54] + struct.pack("<3L", 0xFF, 0xFF00, 0xFF0000)
    return data[:10] + struct.pack("<L", 14 + len(header)) + header + pixels


def short_palette() -> bytes:
    """Encode a TIFF by LZW whose palette has colours of 8 bits."""
    file = encode(BLOCKS.quantize(24, dither=Image.Dither.NONE), "TIFF", compression="raw")
    entry = file.index(struct.pack("<HHL", 320, 3, 768))
    (at,) = struct.unpack_from("<L", file, entry + 8)
    values = np.frombuffer(file, "<u2", 768, at) >> 8
    return file[:at] + values.astype("<u2").tobytes() + file[at + 1536 :]


@pytest.mark.parametrize(
    ("data", "tolerance"),
    [
        (JPEG[:TABLE] + b"\x42" + JPEG[TABLE:], 3),
        (JPEG[:2] + b"\xff\xfe\0\x04" + b"comment of a camera" + JPEG[2:], 3),
        (JPEG[:2] + 2 * PROFILE + JPEG[2:], 3),
        (JPEG[:2] + b"\xff\xe2\0\x0eICC_PROFILE\0" + JPEG[2:], 3),
        (JPEG[:-2] + b"dhavcam\0", 3),
        (JPEG[:-2] + b"dhavcam\0" + JPEG[-2:], 3),
        (PNG[:33] + PHYSICAL[:-1] + b"?" + PNG[33:], 0),
        (PNG[:33] + png_chunk(b"pHYs", b"\0\1") + PNG[33:], 0),
        (PNG[:33] + png_chunk(b"tEXt", b"exif:Make\0camera") * 120 + PNG[33:], 0),
        (red_first(BMP), 0),
        (short_palette(), 1),
        (meta_at_the_end(AVIF), 3),
        (meta_at_the_end(HEIC), 3),
    ],
    ids=[
        "JPEG, byte between segments", "JPEG, short length", "JPEG, profile twice", "JPEG, empty profile", "JPEG, padding, no end",
        "JPEG, padding", "PNG, checksum", "PNG, length", "PNG, many texts", "BMP, red first", "TIFF, palette of 8 bits",
        "AVIF, meta at the end", "HEIC, meta at the end",
    ],
)  # fmt: skip
def test_pixels_are_those_of_the_usual_file(data: bytes, tolerance: int) -> None:
    np.testing.assert_allclose(pixels_of(data).astype(int), PIXELS, atol=tolerance)


def test_cut_file_is_refused_whatever_stands_before_its_pixels() -> None:
    restarts = encode(BLOCKS, "JPEG", restart_marker_blocks=2)
    hole = restarts.index(b"\xff\xd1")
    for cut in (
        JPEG[:2] + 2 * PROFILE + JPEG[2:-20],
        PROGRESSIVE[:SECOND_SCAN] + b"junk" + PROGRESSIVE[SECOND_SCAN:],
        restarts[:hole] + bytes(40) + restarts[hole:],
    ):
        with pytest.raises(InvalidImage, match="truncated or corrupt"):
            pixels_of(cut)


@pytest.mark.parametrize("channels", [1, 4])
def test_avif_with_alpha_or_without_colours_becomes_rgb(channels: int) -> None:
    pixels = np.dstack([PIXELS[:, :, ::-1], np.full(PIXELS.shape[:2], 90, np.uint8)]) if channels == 4 else PIXELS[:, :, 0]
    data = cv2.imencode(".avif", pixels, [cv2.IMWRITE_AVIF_QUALITY, 100])[1].tobytes()
    expected: NDArray[np.uint8] = PIXELS if channels == 4 else np.dstack([PIXELS[:, :, 0]] * 3)
    np.testing.assert_allclose(pixels_of(data).astype(int), expected, atol=4)

    if channels == 1:  # the same values between 16 and 235
        nclx = data.index(b"nclx") + 10
        limited = data[:nclx] + bytes([data[nclx] & 0x7F]) + data[nclx + 1 :]
        wider = np.clip((expected.astype(int) - 16) * 255 / 219, 0, 255)
        np.testing.assert_allclose(pixels_of(limited), wider, atol=6)


COLOURS = {"R": (220, 40, 40), "G": (40, 180, 60), "B": (40, 60, 220), "Y": (230, 210, 40)}
CASES = SHARED / "cases" / "pictures"


def _describe(pixels: NDArray[np.uint8]) -> str:
    """Return size, and the colours of the quadrants in reading order."""
    height, width = pixels.shape[:2]
    quadrants = [pixels[y * height // 4, x * width // 4].astype(int) for y in (1, 3) for x in (1, 3)]
    if all(np.abs(quadrant - grey).max() <= 3 for quadrant, grey in zip(quadrants, (94, 124, 72, 197), strict=True)):
        return f"{width}x{height} grey"
    names = [[name for name, colour in COLOURS.items() if np.abs(quadrant - colour).max() <= 30] for quadrant in quadrants]
    return f"{width}x{height} {''.join(name for near in names for name in near)}"


@pytest.mark.skipif(not CASES.is_dir(), reason="../shared has no pictures that others have reported")
def test_reported_pictures() -> None:
    wrong = {}
    for line in (CASES / "expected.tsv").read_text(encoding="utf-8").splitlines()[1:]:
        name, expected, *_ = line.split("\t")
        try:
            seen = _describe(pixels_of((CASES / name).read_bytes(), 25 * MEGA))
        except GatewayError as error:
            seen = str(error.status)
        if seen not in expected.split(" or "):
            wrong[name] = seen, expected
    assert wrong == {}
