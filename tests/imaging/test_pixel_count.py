"""The number of pixels is read from the header of every format, and nonsense does no harm."""

import random

import pytest
from PIL import Image

from app.imaging.pixel_count import count_pixels
from tests.imaging.samples import encode


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("PNG", {}),
        ("GIF", {}),
        ("BMP", {}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
        ("WEBP", {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}),
    ],
)
@pytest.mark.parametrize("size", [(1, 1), (300, 200), (5000, 17)])
def test_every_format_tells_its_size(name: str, options: dict[str, object], size: tuple[int, int]) -> None:
    """In all variants of WebP, too."""
    data = encode(Image.new("RGB", size, "teal"), name, **options)

    assert count_pixels(data) == size[0] * size[1]


def test_a_bmp_may_be_stored_from_top_to_bottom() -> None:
    """Its height is negative then."""
    data = bytearray(encode(Image.new("RGB", (30, 20)), "BMP"))
    data[22:26] = (-20).to_bytes(4, "little", signed=True)

    assert count_pixels(bytes(data)) == 600


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF", "BMP", "WEBP"])
def test_a_truncated_image_has_no_pixels_or_its_own(name: str) -> None:
    """Wherever it ends, nothing is raised."""
    data = encode(Image.new("RGB", (30, 20)), name)

    assert {count_pixels(data[:length]) for length in range(len(data))} <= set(range(601))


def test_anything_else_has_no_pixels() -> None:
    """Nor does random data behind the magic bytes raise anything."""
    assert count_pixels(b"") == count_pixels(b"no image at all" * 10) == 0
    noise = random.Random(0)  # noqa: S311 - no secret
    for magic in (
        b"\xff\xd8\xff",
        b"\x89PNG",
        b"GIF8",
        b"BM",
        b"RIFF\0\0\0\0WEBPVP8X",
        b"RIFF\0\0\0\0WEBPVP8L",
        b"RIFF\0\0\0\0WEBPVP8 ",
    ):
        for length in range(60):
            assert count_pixels(magic + noise.randbytes(length)) >= 0
