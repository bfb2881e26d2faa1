"""The number of pixels is read from the header of every format, and nonsense does no harm."""

import random
import struct
import tracemalloc

import pytest
from PIL import Image

from app.imaging.header import PixelLimits
from app.imaging.pixel_count import count_pixels
from tests.imaging.samples import encode

LIMITS = PixelLimits(scalable=2_000_000, other=1_000_000)
FILL = bytes(1 << 14)
"""Behind a JPEG, so that it is not too small to count."""


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("GIF", {}),
        ("BMP", {}),
        ("TIFF", {}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}),
    ],
)
@pytest.mark.parametrize("size", [(1, 1), (300, 200), (5000, 17)])
def test_every_format_tells_its_size(name: str, options: dict[str, object], size: tuple[int, int]) -> None:
    data = encode(Image.new("RGB", size, "teal"), name, **options) + FILL

    assert count_pixels(data, LIMITS) == size[0] * size[1]


def test_a_bmp_may_be_stored_from_top_to_bottom() -> None:
    """Its height is negative then."""
    data = bytearray(encode(Image.new("RGB", (30, 20)), "BMP"))
    data[22:26] = (-20).to_bytes(4, "little", signed=True)

    assert count_pixels(bytes(data), LIMITS) == 600


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF"])
def test_a_truncated_image_has_no_pixels_or_its_own(name: str) -> None:
    data = encode(Image.new("RGB", (30, 20)), name, **({"exif": FILL} if name == "JPEG" else {}))

    assert {count_pixels(data[:length], LIMITS) for length in range(len(data))} <= set(range(601))


def test_an_avif_tells_its_size() -> None:
    """AVIF takes several times as long to decode as other formats."""
    assert count_pixels(encode(Image.new("RGB", (300, 200)), "AVIF"), LIMITS) == 60_000


def test_anything_else_has_no_pixels() -> None:
    assert count_pixels(b"", LIMITS) == count_pixels(b"no image at all" * 10, LIMITS) == 0
    noise = random.Random(0)  # noqa: S311 - no secret
    for magic in (
        b"\xff\xd8\xff",
        b"\x89PNG",
        b"GIF8",
        b"BM",
        b"II*\0\x08\0\0\0",
        b"\0\0\0\x0cftypavifispe",
        b"RIFF\0\0\0\0WEBPVP8X",
        b"RIFF\0\0\0\0WEBPVP8L",
        b"RIFF\0\0\0\0WEBPVP8 ",
    ):
        for length in range(60):
            assert count_pixels(magic + noise.randbytes(length), LIMITS) >= 0


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_a_jpeg_tells_its_size_whatever_its_colours_and_however_late(mode: str) -> None:
    """Those that libjpeg-turbo leaves to Pillow take the longest; segments before the frame may be large."""
    data = encode(Image.new(mode, (300, 200)), "JPEG")
    segments = b"".join(b"\xff\xed" + (60_002).to_bytes(2) + bytes(60_000) for _ in range(3))

    assert count_pixels(data[:2] + segments + data[2:], LIMITS) == 60_000


def test_a_jpeg_is_not_searched_beyond_its_first_scan() -> None:
    """That would take long; what comes without a frame header cannot be decoded."""
    data = encode(Image.new("RGB", (300, 200)), "JPEG")
    at = data.index(b"\xff\xc0")
    scan = b"\xff\xda\0\x08" + bytes(6)

    assert count_pixels(data + FILL, LIMITS) == 60_000
    assert count_pixels(data[:at] + scan + data[at:] + FILL, LIMITS) == 0


@pytest.mark.parametrize("tag", [256, 257])
def test_a_tiff_that_repeats_its_size_costs_nothing(tag: int) -> None:
    """Values that are not needed are not read, and such a file is rejected; the first of several tags counts."""
    long = struct.pack("<HHLL", tag, 3, 20_000, 8 + 2 + 12 * 511 + 4) * 511
    data = b"II*\0" + struct.pack("<LH", 8, 511) + long + bytes(4) + bytes(40_000)
    tracemalloc.start()
    assert count_pixels(data, LIMITS) == 0
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 10_000
    entries = [(256, 30), (257, 20)] + [(256, 1), (257, 1)] * 100
    tags = b"".join(struct.pack("<HHLL", name, 4, 1, value) for name, value in entries)
    assert count_pixels(b"II*\0" + struct.pack("<LH", 8, len(entries)) + tags, LIMITS) == 600


def test_a_small_jpeg_has_too_few_pixels_to_count() -> None:
    """A small file of another format may have millions of pixels."""
    assert count_pixels(encode(Image.new("L", (300, 200)), "JPEG"), LIMITS) == 0
    assert count_pixels(encode(Image.new("1", (1000, 1000)), "PNG"), LIMITS) == 1_000_000


def test_an_image_that_will_be_rejected_has_no_pixels() -> None:
    """It is not decoded; JPEGs may be larger than others."""
    assert count_pixels(encode(Image.new("L", (1001, 1000)), "PNG"), LIMITS) == 0
    assert count_pixels(encode(Image.new("L", (2000, 1000)), "JPEG") + FILL, LIMITS) == 2_000_000
    assert count_pixels(encode(Image.new("L", (2001, 1000)), "JPEG") + FILL, LIMITS) == 0
