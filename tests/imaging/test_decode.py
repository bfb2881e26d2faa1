"""Decoding: pixels of every format, mode and orientation, also at a reduced size."""

import pickle
import random
import subprocess
import sys
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache, partial
from io import BytesIO
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from app.errors import GatewayError, InvalidImage
from app.imaging.decode import decode, estimate_decoding, max_decode_bytes
from app.imaging.header import ImageHeader, PixelLimits, count_pixels, read_header
from tests.imaging.samples import (
    AVIF,
    FORMATS,
    GREY,
    GREY_ALPHA,
    HEIC,
    MEGA,
    NOISE,
    PIXELS,
    RGB,
    RGBA,
    encode,
    exif_of,
    limits,
    png,
    store,
)
from tests.support import ROOT


def pixels_of(data: bytes) -> NDArray[np.uint8]:
    header = read_header(data, limits(MEGA))
    return decode(header, (header.width, header.height))


def to_rgb(grey: Any) -> NDArray[np.uint8]:  # noqa: ANN401
    return np.stack([np.asarray(grey, np.uint8)] * 3, axis=-1)


@pytest.mark.parametrize("behind", [b"", b"PK\x03\x04 an archive"])
@pytest.mark.parametrize("image_format", ["PNG", "WEBP", "BMP", "TIFF"])
def test_lossless_formats_are_decoded_exactly(image_format: str, behind: bytes) -> None:
    pixels = pixels_of(encode(Image.fromarray(PIXELS), image_format) + behind)

    np.testing.assert_array_equal(pixels, PIXELS)


@pytest.mark.parametrize("progressive", [False, True])
def test_jpeg_is_decoded_to_within_its_loss(*, progressive: bool) -> None:
    pixels = pixels_of(encode(Image.fromarray(PIXELS), "JPEG", progressive=progressive))

    np.testing.assert_allclose(pixels.astype(int), PIXELS, atol=6)


@pytest.mark.parametrize("image_format", ["GIF", "WEBP"])
def test_first_frame_of_an_animation_is_decoded(image_format: str) -> None:
    frames = [Image.fromarray(PIXELS), Image.fromarray(PIXELS[::-1].copy())]

    pixels = pixels_of(encode(frames[0], image_format, save_all=True, append_images=frames[1:]))

    np.testing.assert_array_equal(pixels, PIXELS)


def test_first_image_of_an_mpo_is_decoded() -> None:
    """Phones append a second image to a JPEG; it is ignored."""
    data = encode(Image.fromarray(PIXELS), "MPO", save_all=True, append_images=[NOISE], quality=95, subsampling=0)

    np.testing.assert_allclose(pixels_of(data).astype(int), PIXELS, atol=6)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("image_format", "tolerance"), [("PNG", 0), ("WEBP", 0), ("JPEG", 6)])
def test_image_is_turned_upright(image_format: str, tolerance: int, orientation: int) -> None:
    data = encode(Image.fromarray(store(PIXELS, orientation)), image_format, exif=exif_of(orientation))

    header = read_header(data, limits(MEGA))
    pixels = decode(header, (32, 16))

    assert (header.width, header.height, header.orientation) == (32, 16, orientation)
    np.testing.assert_allclose(pixels.astype(int), PIXELS, atol=tolerance)


@pytest.mark.parametrize("image_format", ["PNG", "BMP", "GIF"])
def test_one_bit_is_black_and_white(image_format: str) -> None:
    bits = PIXELS[:, :, 0] > 127

    pixels = pixels_of(encode(Image.fromarray(bits), image_format))

    np.testing.assert_array_equal(pixels, to_rgb(bits * 255))


@pytest.mark.parametrize(("image_format", "tolerance"), [("PNG", 0), ("BMP", 0), ("GIF", 0), ("JPEG", 6)])
def test_grey_becomes_three_equal_channels(image_format: str, tolerance: int) -> None:
    grey = PIXELS[:, :, 0]
    pixels = pixels_of(encode(Image.fromarray(grey), image_format))
    np.testing.assert_allclose(pixels.astype(int), to_rgb(grey), atol=tolerance)


@pytest.mark.parametrize("alpha", [0, 128, 255])
@pytest.mark.parametrize("image_format", ["PNG", "WEBP"])
def test_alpha_is_dropped(image_format: str, alpha: int) -> None:
    """Colours stay as stored, however transparent they are."""
    pixels = np.dstack([PIXELS, np.full(PIXELS.shape[:2], alpha, np.uint8)])

    data = encode(Image.fromarray(pixels), image_format, exact=True)

    np.testing.assert_array_equal(pixels_of(data), PIXELS)


def test_alpha_of_grey_is_dropped() -> None:
    grey = PIXELS[:, :, 0]

    pixels = pixels_of(encode(Image.fromarray(np.dstack([grey, grey // 2])), "PNG"))

    np.testing.assert_array_equal(pixels, to_rgb(grey))


@pytest.mark.parametrize("image_format", ["PNG", "BMP", "GIF"])
def test_palette_is_looked_up(image_format: str) -> None:
    palette = Image.fromarray(PIXELS).quantize(8)

    np.testing.assert_array_equal(pixels_of(encode(palette, image_format)), np.asarray(palette.convert("RGB")))


@pytest.mark.parametrize(
    ("image_format", "transparency"),
    [("PNG", 0), ("PNG", 3), ("PNG", bytes(range(8))), ("PNG", b"\0" * 8), ("GIF", 0), ("GIF", 3)],
)
def test_transparent_palette_entries_keep_their_colour(image_format: str, transparency: int | bytes) -> None:
    """Only the transparency, of one index or of a table, is dropped; Pillow must not warn."""
    palette = Image.fromarray(PIXELS).quantize(8)

    pixels = pixels_of(encode(palette, image_format, transparency=transparency))

    np.testing.assert_array_equal(pixels, np.asarray(palette.convert("RGB")))


def test_palette_with_alpha_keeps_its_colours() -> None:
    """No sample file has the mode PA."""
    palette = Image.fromarray(PIXELS).quantize(8)
    expected = np.asarray(palette.convert("RGB"))
    image = palette.convert("PA")

    pixels = decode(ImageHeader(b"", image, *image.size, 1), image.size)

    np.testing.assert_array_equal(pixels, expected)


@pytest.mark.parametrize("transparency", [0, (10, 20, 30)])
def test_transparent_colour_of_a_png_is_kept(transparency: int | tuple[int, int, int]) -> None:
    mode = "RGB" if isinstance(transparency, tuple) else "L"
    image = Image.new(mode, (4, 4), transparency)

    pixels = pixels_of(encode(image, "PNG", transparency=transparency))

    np.testing.assert_array_equal(pixels, np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (30, 60, 90)])
def test_cmyk_jpeg_is_converted(colour: tuple[int, int, int]) -> None:
    data = encode(Image.new("RGB", (16, 16), colour).convert("CMYK"), "JPEG")

    np.testing.assert_allclose(pixels_of(data).astype(int), np.full((16, 16, 3), colour), atol=6)


def test_sixteen_bit_grey_is_scaled() -> None:
    """A ramp over all 65536 values becomes one over 256 values; nothing is clipped to white."""
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)

    pixels = pixels_of(png(256, 256, 16, GREY, ramp.astype(">u2").tobytes()))

    np.testing.assert_array_equal(pixels, to_rgb(ramp >> 8))


@pytest.mark.parametrize(("colour", "channels"), [(GREY_ALPHA, 2), (RGB, 3), (RGBA, 4)])
def test_other_sixteen_bit_modes_are_scaled(colour: int, channels: int) -> None:
    values = np.random.default_rng(3).integers(0, 65536, (8, 8, channels), np.uint16)

    pixels = pixels_of(png(8, 8, 16, colour, values.astype(">u2").tobytes()))

    high = (values >> 8).astype(np.uint8)
    np.testing.assert_array_equal(pixels, to_rgb(high[:, :, 0]) if channels == 2 else high[:, :, :3])


QUICK = {"PNG": {"compress_level": 1}, "WEBP": {"method": 0, "quality": 0}}
"""Options for fast encoding, by format."""


def large(mode: str) -> Image.Image:
    if mode == "P":
        return NOISE.quantize(60).resize((1200, 1001))
    image = NOISE.resize((1200, 1001))
    if mode.endswith("A"):
        image.putalpha(image.convert("L"))
    return image.convert(mode)


@pytest.mark.parametrize(
    ("mode", "image_format"),
    [
        *[(mode, "PNG") for mode in ("RGB", "RGBA", "LA", "L", "1", "P")],
        *[("RGB", "BMP"), ("RGB", "WEBP"), ("P", "GIF"), ("P", "BMP"), ("CMYK", "JPEG")],
    ],
)
def test_large_image_has_the_pixels_that_pillow_converts(mode: str, image_format: str) -> None:
    """A large image is converted in bands, the last of which is smaller than the others."""
    image = large(mode)
    data = encode(image, image_format, **QUICK.get(image_format, {}))
    header = read_header(data, limits(2 * MEGA))

    pixels = decode(header, image.size)

    with Image.open(BytesIO(data)) as file:
        np.testing.assert_array_equal(pixels, np.asarray(file.convert("RGB")))


def test_large_palette_with_transparency_keeps_its_colours() -> None:
    """Pillow must not warn for any band."""
    palette = large("P")

    pixels = decode(read_header(encode(palette, "PNG", transparency=bytes(range(60))), limits(2 * MEGA)), palette.size)

    np.testing.assert_array_equal(pixels, np.asarray(palette.convert("RGB")))


def test_large_sixteen_bit_grey_is_scaled() -> None:
    values = np.random.default_rng(4).integers(0, 65536, (1001, 1200), np.uint16)

    pixels = decode(read_header(png(1200, 1001, 16, GREY, values.astype(">u2").tobytes()), limits(2 * MEGA)), (1200, 1001))

    np.testing.assert_array_equal(pixels, to_rgb(values >> 8))


@pytest.mark.parametrize(("depth", "colour"), [(8, RGB), (8, RGBA), (16, RGBA), (16, GREY), (1, GREY)])
def test_decoding_a_large_image_makes_no_whole_copies(depth: int, colour: int) -> None:
    channels = {GREY: 1, RGB: 3, RGBA: 4}[colour]
    header = read_header(png(4000, 3000, depth, colour, bytes(4000 * 3000 * channels * depth // 8)), limits(12 * MEGA))
    tracemalloc.start()
    decode(header, (4000, 3000))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert peak < 4000 * 3000 * 3 + 5_000_000


@pytest.mark.parametrize("length", [None, -500], ids=["decoded", "truncated"])
def test_pillows_image_is_released_once_it_is_decoded(length: int | None) -> None:
    """This also holds if decoding failed, and while the header is still in use."""
    header = read_header(encode(NOISE, "PNG")[:length], limits(MEGA))
    with suppress(InvalidImage):
        decode(header, NOISE.size)

    assert header.file is not None
    with pytest.raises(ValueError, match="closed image"):
        header.file.getpixel((0, 0))


@cache
def flat(mode: str, image_format: str, orientation: int = 1, size: tuple[int, int] = (4000, 3000), **options: int) -> bytes:
    image = Image.new(mode, size, (99,) * len(mode) if mode != "P" else 9)
    exif = {} if orientation == 1 else {"exif": exif_of(orientation)}
    return encode(image, image_format, **exif, **options, **QUICK.get(image_format, {}))


Make = Callable[[], bytes]
"""Encodes an image when a test runs, not when tests are collected."""
ESTIMATES = {
    "JPEG": (partial(flat, "RGB", "JPEG"), (2001, 1501), 3),
    "half a JPEG": (partial(flat, "RGB", "JPEG"), (2000, 1500), 3 / 4),
    "upside down": (partial(flat, "RGB", "JPEG", 3), (4000, 3000), 6),
    "sideways": (partial(flat, "RGB", "JPEG", 6), (1500, 2000), 6 / 4),
    "progressive": (partial(flat, "RGB", "JPEG", progressive=True), (2000, 1500), 3 / 4 + 8),
    "CMYK": (partial(flat, "CMYK", "JPEG"), (1999, 1499), 7 / 4),
    "progressive CMYK": (partial(flat, "CMYK", "JPEG", progressive=True), (4000, 3000), 7 + 8),
    "PNG": (partial(flat, "RGBA", "PNG"), (1, 1), 7),
    "turned PNG": (partial(flat, "RGB", "PNG", 6), (1, 1), 7),
    "BMP": (partial(flat, "RGB", "BMP"), (1, 1), 7),
    "GIF": (partial(flat, "P", "GIF"), (1, 1), 7),
    "WebP": (partial(flat, "RGB", "WEBP"), (1, 1), 16),
}


@pytest.mark.parametrize(("make", "min_decode_size", "pixel_bytes"), ESTIMATES.values(), ids=ESTIMATES)
def test_memory_is_estimated_by_the_format_and_size(make: Make, min_decode_size: tuple[int, int], pixel_bytes: float) -> None:
    header = read_header(make(), limits(12 * MEGA))

    estimate = estimate_decoding(header, min_decode_size).nbytes

    assert estimate == 12 * MEGA * pixel_bytes
    assert estimate <= max_decode_bytes(PixelLimits(jpeg=12 * MEGA, non_jpeg=0 if header.file is None else 12 * MEGA), 0)


def test_memory_of_a_tiff_includes_two_copies_of_the_file() -> None:
    data = flat("RGB", "TIFF")

    estimate = estimate_decoding(read_header(data, limits(12 * MEGA)), (1, 1)).nbytes

    assert estimate == 12 * MEGA * 16 + 2 * len(data)
    assert estimate <= max_decode_bytes(PixelLimits(jpeg=0, non_jpeg=12 * MEGA), len(data))


@pytest.mark.parametrize("data", [AVIF, HEIC], ids=["AVIF", "HEIC"])
def test_memory_of_an_image_that_is_decoded_apart_is_reserved_before(data: bytes) -> None:
    """An AVIF takes twice the memory per pixel, with half the pixel limit."""
    reserved: list[int] = []
    header = read_header(data, limits(MEGA), reserved.append)
    pixels = count_pixels(data, limits(MEGA))

    assert estimate_decoding(header, (1, 1)) == ((32, 16), 0)
    assert reserved == [pixels * (32 if data is AVIF else 16) + 3 * len(data)]
    assert reserved[0] == max_decode_bytes(PixelLimits(0, pixels * (2 if data is AVIF else 1)), len(data))
    with pytest.raises(MemoryError):
        read_header(data, limits(MEGA), Mock(side_effect=MemoryError))


# Decodes each file in a separate process, and prints the memory taken and the estimate, in bytes.
MEASURE = """
import os, pickle, sys
from pathlib import Path
from app.imaging.decode import decode, estimate_decoding
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
        print(status("VmHWM") - before, estimate_decoding(header, size).nbytes, flush=True)
        os._exit(0)
    if os.wait()[1]:
        sys.exit("it failed")
"""


@pytest.fixture(scope="module")
def measuring() -> Iterator["subprocess.Popen[bytes]"]:
    command = [sys.executable, "-c", MEASURE]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process


CASES = {**ESTIMATES, "TIFF": (partial(flat, "RGB", "TIFF"), (1, 1), 16)}


@pytest.mark.parametrize(("make", "min_decode_size"), [case[:2] for case in CASES.values()], ids=CASES)
def test_decoding_takes_no_more_memory_than_estimated(
    measuring: "subprocess.Popen[bytes]", make: Make, min_decode_size: tuple[int, int]
) -> None:
    assert measuring.stdin is not None
    assert measuring.stdout is not None
    pickle.dump((make(), min_decode_size), measuring.stdin)
    measuring.stdin.flush()

    taken, estimate = map(int, measuring.stdout.readline().split())
    assert taken < estimate + 8_000_000


@pytest.mark.parametrize("image_format", FORMATS)
@pytest.mark.parametrize("percent", range(5, 100, 5))
def test_truncated_image_is_invalid(image_format: str, percent: int) -> None:
    data = encode(NOISE, image_format)
    cut = data[: len(data) * percent // 100]

    with pytest.raises(InvalidImage):
        pixels_of(cut)


def decode_or_refuse(data: bytes) -> None:
    """Read and decode a file; only errors of the gateway may be raised."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            header = read_header(data, limits(MEGA))
            pixels = decode(header, (header.width, header.height))
        except GatewayError:
            return
    assert pixels.shape == (header.height, header.width, 3)


@settings(max_examples=200, deadline=None)
@given(
    st.sampled_from(
        [
            b"",
            b"\xff\xd8\xff",
            b"\x89PNG\r\n\x1a\n",
            b"RIFF\0\0\0\0WEBP",
            b"GIF89a",
            b"GIF87a",
            b"BM",
            b"II*\0\x08\0\0\0",
            b"\0\0\0\x0cftypavif",
        ]
    ),
    st.binary(),
)
def test_random_bytes_raise_only_gateway_errors(magic: bytes, rest: bytes) -> None:
    decode_or_refuse(magic + rest)


@pytest.mark.parametrize("image_format", FORMATS)
def test_damaged_files_raise_only_gateway_errors(image_format: str) -> None:
    data = encode(Image.fromarray(PIXELS), image_format, **({} if image_format in {"GIF", "BMP"} else {"exif": exif_of(6)}))
    chance = random.Random(image_format)  # noqa: S311

    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(min(len(data), 200))] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        decode_or_refuse(bytes(damaged))


def gradient(width: int, height: int) -> NDArray[np.uint8]:
    """Draw a gradient, which looks the same at every size."""
    across = np.linspace(0, 255, width, dtype=np.uint8)
    down = np.linspace(0, 255, height, dtype=np.uint8)
    return np.dstack([np.tile(across, (height, 1)), np.tile(down[:, None], (1, width)), np.full((height, width), 99, np.uint8)])


@pytest.mark.parametrize("min_decode_size", [(600, 450), (1000, 400), (200, 750)])
@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
def test_large_jpeg_is_decoded_at_a_reduced_size(orientation: int, min_decode_size: tuple[int, int]) -> None:
    data = encode(Image.fromarray(store(gradient(4000, 3000), orientation)), "JPEG", exif=exif_of(orientation))

    header = read_header(data, limits(12 * MEGA))
    pixels = decode(header, min_decode_size)

    assert (header.width, header.height) == (4000, 3000)
    assert pixels.shape == (750, 1000, 3)
    np.testing.assert_allclose(pixels.astype(int), gradient(1000, 750), atol=6)


@pytest.mark.parametrize(
    ("min_decode_size", "size"),
    [
        ((1600, 1200), (1600, 1200)),
        ((801, 600), (1600, 1200)),
        ((800, 600), (800, 600)),
        ((200, 150), (200, 150)),
        ((1, 1), (200, 150)),
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_is_never_smaller_than_needed(mode: str, min_decode_size: tuple[int, int], size: tuple[int, int]) -> None:
    """The reduction is the largest of 1, 2, 4 and 8 that leaves both sides long enough."""
    header = read_header(encode(Image.new(mode, (1600, 1200)), "JPEG"), limits(2 * MEGA))

    assert decode(header, min_decode_size).shape[1::-1] == size


def test_large_mpo_is_decoded_at_a_reduced_size() -> None:
    data = encode(Image.new("RGB", (1600, 1200)), "MPO", save_all=True, append_images=[NOISE])

    assert decode(read_header(data, limits(2 * MEGA)), (600, 450)).shape == (600, 800, 3)


@pytest.mark.parametrize("image_format", ["PNG", "WEBP", "BMP", "GIF"])
def test_other_formats_keep_their_size(image_format: str) -> None:
    assert decode(read_header(encode(NOISE, image_format), limits(MEGA)), (4, 4)).shape == (48, 64, 3)


def test_upright_jpeg_is_decoded_into_memory_of_its_size() -> None:
    data = encode(Image.fromarray(PIXELS), "JPEG")
    out = np.zeros((16, 32, 3), np.uint8)

    pixels = decode(read_header(data, limits(MEGA)), (32, 16), out)

    assert pixels is out
    np.testing.assert_array_equal(out, pixels_of(data))


def test_reduced_jpeg_is_decoded_into_memory_of_its_size() -> None:
    data = encode(Image.fromarray(gradient(1600, 1200)), "JPEG")
    out = np.zeros((600, 800, 3), np.uint8)

    assert decode(read_header(data, limits(2 * MEGA)), (800, 600), out) is out
    np.testing.assert_allclose(out.astype(int), gradient(800, 600), atol=6)


@pytest.mark.parametrize(
    ("image_format", "orientation", "size"),
    [("JPEG", 1, (17, 32)), ("JPEG", 3, (16, 32)), ("JPEG", 6, (16, 32)), ("JPEG", 6, (32, 16)), ("PNG", 1, (16, 32))],
    ids=["another size", "upside down", "sideways", "sideways as stored", "not a JPEG"],
)
def test_memory_that_cannot_be_decoded_into_is_left_alone(image_format: str, orientation: int, size: tuple[int, int]) -> None:
    data = encode(Image.fromarray(store(PIXELS, orientation)), image_format, exif=exif_of(orientation))
    out = np.full((*size, 3), 7, np.uint8)

    pixels = decode(read_header(data, limits(MEGA)), (32, 16), out)

    assert not np.may_share_memory(pixels, out)
    assert (out == 7).all()
    np.testing.assert_allclose(pixels.astype(int), PIXELS, atol=6)
