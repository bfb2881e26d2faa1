"""Decoding: pixels of every format, mode and orientation, also at a reduced size; and damaged files of every format."""

import pickle
import subprocess
import sys
from collections.abc import Iterator
from io import BytesIO
from random import Random
from typing import Any, NamedTuple
from unittest.mock import Mock

import cv2
import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.errors import InvalidImage
from app.imaging import tiff
from app.imaging.decode import decode, estimate_decoding, max_request_bytes
from app.imaging.header import PixelLimits, count_pixels, read_header
from tests.imaging.samples import AVIF, HEIC, MEGA, NOISE, PIXELS, encode, exif_of, gradient, limits, pixels_of, store, to_rgb
from tests.support import ROOT, sample_image

GREY_BLOCKS = PIXELS[:, :, 0]
BLOCKS, PALETTE = Image.fromarray(PIXELS), Image.fromarray(PIXELS).quantize(8)
ANIMATION = {"save_all": True, "append_images": [Image.fromarray(PIXELS[::-1].copy())]}
COLOURS = np.asarray(PALETTE.convert("RGB"))
"""Those of the palette's pixels."""
CLEAR = Image.fromarray(np.dstack([PIXELS, np.zeros(PIXELS.shape[:2], np.uint8)]))
QUICK = {"PNG": {"compress_level": 1}, "WEBP": {"method": 0, "quality": 0}}
"""Options for fast encoding, by format."""


@pytest.mark.parametrize(
    ("image", "image_format", "options", "expected"),
    [
        *((BLOCKS, name, {}, PIXELS) for name in ("PNG", "WEBP", "BMP", "TIFF")),
        *((BLOCKS, name, ANIMATION, PIXELS) for name in ("GIF", "WEBP")),
        *((CLEAR, name, {"exact": True}, PIXELS) for name in ("PNG", "WEBP")),
        (Image.fromarray(np.dstack([GREY_BLOCKS, GREY_BLOCKS // 2])), "PNG", {}, to_rgb(GREY_BLOCKS)),
        (PALETTE, "PNG", {"transparency": 3}, COLOURS),
        (PALETTE, "GIF", {"transparency": 3}, COLOURS),
        (Image.new("RGB", (4, 4), (10, 20, 30)), "PNG", {"transparency": (10, 20, 30)}, np.full((4, 4, 3), (10, 20, 30))),
    ],
)
def test_lossless_formats_are_decoded_exactly(
    image: Image.Image, image_format: str, options: dict[str, Any], expected: NDArray[np.uint8]
) -> None:
    np.testing.assert_array_equal(pixels_of(encode(image, image_format, **options) + b"PK\x03\x04 an archive"), expected)


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (encode(BLOCKS, "JPEG", progressive=True), PIXELS),
        (encode(BLOCKS, "MPO", save_all=True, append_images=[NOISE], quality=95, subsampling=0), PIXELS),
        (encode(Image.fromarray(GREY_BLOCKS), "JPEG"), to_rgb(GREY_BLOCKS)),
        (encode(Image.new("RGB", (16, 16), (30, 60, 90)).convert("CMYK"), "JPEG"), np.full((16, 16, 3), (30, 60, 90))),
    ],
)
def test_jpeg_is_decoded_to_within_its_loss(data: bytes, expected: NDArray[np.uint8]) -> None:
    """Phones append a second image to a JPEG, as an MPO; it is ignored."""
    np.testing.assert_allclose(pixels_of(data).astype(int), expected, atol=6)


@pytest.mark.parametrize(
    ("mode", "image_format", "options"),
    [
        *((mode, "PNG", {}) for mode in ("RGBA", "1")),
        ("P", "PNG", {"transparency": bytes(range(60))}),
        ("CMYK", "JPEG", {}),
    ],
)
def test_large_image_has_the_pixels_that_pillow_converts(mode: str, image_format: str, options: dict[str, Any]) -> None:
    """A large image is converted in bands, the last of which is smaller than the others."""
    image = (NOISE.quantize(60) if mode == "P" else NOISE).resize((1200, 1001))
    if mode.endswith("A"):
        image.putalpha(image.convert("L"))
    image = image if mode == "P" else image.convert(mode)
    data = encode(image, image_format, **QUICK.get(image_format, {}), **options)

    with Image.open(BytesIO(data)) as file:
        np.testing.assert_array_equal(pixels_of(data), np.asarray((image if options else file).convert("RGB")))


# Decodes each file in a separate process, and prints the memory taken, in bytes.
MEASURE = """
import os, pickle, sys
from pathlib import Path
from app.imaging.decode import decode
from app.imaging.header import PixelLimits, read_header
def status(field):
    return int(Path("/proc/self/status").read_text().partition(field + ":")[2].split()[0]) * 1024
while sys.stdin.buffer.peek(1):
    data, size = pickle.load(sys.stdin.buffer)
    if os.fork() == 0:
        header = read_header(data, PixelLimits(10**8, 10**8))
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak
        before = status("VmRSS")
        decode(header, size)
        print(status("VmHWM") - before, flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit("it failed")
"""


@pytest.fixture(scope="module")
def measuring() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen([sys.executable, "-c", MEASURE], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process


@pytest.mark.parametrize(
    ("kind", "options", "min_decode_size", "pixel_bytes"),
    [
        ("RGB JPEG", {}, (2000, 1500), 3 / 4),
        ("RGB JPEG", {"exif": exif_of(6)}, (1500, 2000), 6 / 4),
        ("RGB JPEG", {"progressive": True}, (2000, 1500), 3 / 4 + 8),
        ("CMYK JPEG", {}, (1999, 1499), 7 / 4),
        ("CMYK JPEG", {"progressive": True}, (4000, 3000), 7 + 8),
        ("RGB PNG", {"exif": exif_of(6)}, (1, 1), 7),
        ("RGB WEBP", {}, (1, 1), 16),
        ("RGB TIFF", {}, (1, 1), 16),
    ],
)
def test_decoding_takes_no_more_memory_than_estimated(
    measuring: "subprocess.Popen[bytes]", kind: str, options: dict[str, Any], min_decode_size: tuple[int, int], pixel_bytes: float
) -> None:
    """With copies of the file, without what no decoder needs; a TIFF has two."""
    mode, image_format = kind.split()
    image = Image.new(mode, (4000, 3000), 9 if mode == "P" else (99,) * len(mode))
    data = encode(image, image_format, **options, **QUICK.get(image_format, {}))
    header = read_header(data, limits(12 * MEGA))
    most = PixelLimits(jpeg=12 * MEGA, non_jpeg=0 if header.file is None and header.tiff is None else 12 * MEGA)
    assert measuring.stdin is not None
    assert measuring.stdout is not None
    pickle.dump((data, min_decode_size), measuring.stdin)
    measuring.stdin.flush()

    estimate = estimate_decoding(header, min_decode_size).nbytes
    copies = {"TIFF": 2, "WEBP": 0, "GIF": 0}.get(image_format, 1) * len(data)
    assert int(measuring.stdout.readline()) < estimate + 8_000_000
    assert estimate == 12 * MEGA * pixel_bytes + copies
    assert estimate <= max_request_bytes(most, len(data) if header.tiff else 0)


@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
def test_large_jpeg_is_decoded_upright_at_a_reduced_size(orientation: int) -> None:
    data = encode(Image.fromarray(store(gradient(4000, 3000), orientation)), "JPEG", exif=exif_of(orientation))
    for min_decode_size in ((600, 450), (1000, 400)):
        pixels = decode(read_header(data, limits(12 * MEGA)), min_decode_size)

        assert pixels.shape == (750, 1000, 3)
        np.testing.assert_allclose(pixels.astype(int), gradient(1000, 750), atol=6)


@pytest.mark.parametrize(
    ("data", "min_decode_size", "size"),
    [
        *(
            (encode(Image.new(mode, (1600, 1200)), "JPEG"), least, size)
            for mode in ("RGB", "CMYK")
            for least, size in (((801, 600), (1600, 1200)), ((800, 600), (800, 600)))
        ),
        (encode(Image.new("RGB", (1600, 1200)), "MPO", save_all=True, append_images=[NOISE]), (600, 450), (800, 600)),
        (encode(NOISE, "PNG"), (24, 18), NOISE.size),
    ],
)
def test_jpeg_alone_is_reduced_but_never_below_what_is_needed(
    data: bytes, min_decode_size: tuple[int, int], size: tuple[int, int]
) -> None:
    assert decode(read_header(data, limits(2 * MEGA)), min_decode_size).shape[1::-1] == size


@pytest.mark.parametrize("data", [AVIF, HEIC], ids=["AVIF", "HEIC"])
def test_memory_of_an_image_that_is_decoded_apart_is_reserved_before(data: bytes) -> None:
    reserved: list[int] = []
    header = read_header(data, limits(MEGA), reserved.append)
    pixels = count_pixels(data, limits(MEGA))

    assert estimate_decoding(header, (1, 1)) == ((32, 16), 0)
    assert reserved == [pixels * (32 if data is AVIF else 16) + 3 * len(data)]
    with pytest.raises(MemoryError):
        read_header(data, limits(MEGA), Mock(side_effect=MemoryError))


CAT = Image.open(BytesIO(sample_image("chelsea.jpg"))).convert("RGB").resize((150, 100))
END_BYTES = 20
"""At the end of a file, marks of the end and padding: an image may be whole without them."""


class Format(NamedTuple):
    """A file, and the least percentages of those with each kind of damage that are refused."""

    whole: bytes
    cut: int = 100
    gap: int = 100
    zeroed: int = 0
    flipped: int = 0
    times: int = 50
    """How many are damaged; less where each takes a process."""
    zeros_are_pixels: bool = False
    """Whether zeros may be pixels of one colour."""


def encode_jpeg(mode: str, *, progressive: bool = False) -> bytes:
    return encode(CAT.convert(mode), "JPEG", progressive=progressive, subsampling=-1)


def encode_tiff(compression: int) -> bytes:
    """Encode a TIFF of several strips, whose directory precedes them."""
    options = [cv2.IMWRITE_TIFF_COMPRESSION, compression, cv2.IMWRITE_TIFF_ROWSPERSTRIP, 16]
    data = cv2.imencode(".tiff", np.asarray(CAT)[:, :, ::-1], options)[1].tobytes()
    return tiff.rewrite(data, tiff.read_header(data))


FILES = {
    "JPEG": Format(encode_jpeg("RGB"), zeroed=20),
    "JPEG, progressive": Format(encode_jpeg("RGB", progressive=True), gap=90, zeroed=20),  # it may end between two scans
    "JPEG, CMYK": Format(encode_jpeg("CMYK"), zeroed=20),
    "PNG": Format(encode(CAT, "PNG"), zeroed=100, flipped=100),
    "WebP, lossless": Format(encode(CAT, "WEBP")),
    "GIF": Format(encode(CAT, "GIF"), gap=90, zeroed=90),
    "BMP": Format(encode(CAT, "BMP"), zeros_are_pixels=True),
    "TIFF": Format(encode_tiff(1), zeros_are_pixels=True),
    "TIFF, Deflate": Format(encode_tiff(8), zeroed=100, flipped=100),
    "TIFF, LZW": Format(encode_tiff(5), zeroed=90, times=10),
    "AVIF": Format(encode(CAT, "AVIF"), zeroed=100, flipped=100, times=10),
    "HEIC": Format(HEIC, times=10),
}


def damaged(data: bytes, damage: str, random: Random) -> bytes:
    if damage == "cut":
        return data[: random.randrange(40, len(data) - END_BYTES)]
    # Half of the pixels precede, not the boxes of an AVIF or HEIC.
    at = random.randrange(max(len(data) // 2, data.find(b"mdat") + 8), len(data) - END_BYTES)
    if damage == "gap":
        return data[:at] + data[-END_BYTES // 2 :]
    if damage == "zeroed":
        length = len(data[at : at + random.choice([16, 300, 2000])])
        return data[:at] + bytes(length) + data[at + length :]
    return data[:at] + bytes([data[at] ^ 1 << random.randrange(8)]) + data[at + 1 :]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", ["cut", "gap", "zeroed", "flipped"])
def test_damaged_file_is_refused_as_far_as_its_damage_is_seen(name: str, damage: str) -> None:
    tested = FILES[name]
    shape = pixels_of(tested.whole).shape
    random = Random(29)  # noqa: S311 - not a secret
    refused = 0
    for _ in range(tested.times):
        data = damaged(tested.whole, damage, random)
        if name == "JPEG" and len(data) > len(tested.whole) // 2:
            assert decode(read_header(data, limits(MEGA)), (1, 1), allows_truncated=True).size
        try:
            pixels = pixels_of(data)
        except InvalidImage:
            refused += 1
            continue
        assert pixels.shape == shape
        assert tested.zeros_are_pixels or np.ptp(pixels[-1])
    assert refused * 100 >= tested.times * getattr(tested, damage)
