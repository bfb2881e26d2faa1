"""Reading a picture: what is refused by its header, and what the pixels are once decoded."""

import random
import struct
import tracemalloc
import warnings
import zlib
from io import BytesIO
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import ExifTags, Image

from app.errors import BrokenPicture, GatewayError, PictureSides, PictureTooLarge, UnsupportedFormat
from app.image import MAX_SIDE, Unread, decode, is_simd, read_header

FORMATS = ("JPEG", "PNG", "WEBP", "BMP", "GIF")
EXACT: dict[str, dict[str, Any]] = {"JPEG": {"quality": 95, "subsampling": 0}, "WEBP": {"lossless": True}}
MEGA = 10**6
GREY, GREY_ALPHA, RGB, RGBA = 0, 4, 2, 6
# 32 x 16 in blocks of one colour, no two alike, so that JPEG keeps them and every turn is seen.
BLOCKS = np.random.default_rng(1).permutation(np.linspace(0, 255, 24)).astype(np.uint8).reshape(2, 4, 3)
PIXELS = BLOCKS.repeat(8, axis=0).repeat(8, axis=1)
NOISE = Image.fromarray(np.random.default_rng(2).integers(0, 256, (48, 64, 3), np.uint8))


def encoded(picture: Image.Image, form: str, **options: Any) -> bytes:  # noqa: ANN401
    buffer = BytesIO()
    picture.save(buffer, form, **{**EXACT.get(form, {}), **options})
    return buffer.getvalue()


def turned(pixels: NDArray[np.uint8], orientation: int) -> NDArray[np.uint8]:
    """Store pixels as a camera does that notes this orientation."""
    ways: dict[int, NDArray[np.uint8]] = {
        1: pixels,
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.transpose(1, 0, 2),
        6: np.rot90(pixels, 1),
        7: pixels[::-1, ::-1].transpose(1, 0, 2),
        8: np.rot90(pixels, -1),
    }
    return np.ascontiguousarray(ways[orientation])


def oriented(orientation: Any) -> Image.Exif:  # noqa: ANN401
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = orientation
    return exif


def png(width: int, height: int, depth: int, colour: int, data: bytes = b"") -> bytes:
    """Write a PNG by hand; with no data it is all header."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    lines = [b"\0" + data[i : i + len(data) // height] for i in range(0, len(data), len(data) // height)] if data else []
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", zlib.compress(b"".join(lines))) + chunk(b"IEND", b"")


def pixels_of(data: bytes) -> NDArray[np.uint8]:
    unread = read_header(data, MEGA)
    return decode(unread, (unread.width, unread.height))


def rgb(grey: Any) -> NDArray[np.uint8]:  # noqa: ANN401
    return np.stack([np.asarray(grey, np.uint8)] * 3, axis=-1)


def from_memory(picture: Image.Image) -> NDArray[np.uint8]:
    return decode(Unread(b"", picture, *picture.size, 1), picture.size)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "BMP"])
def test_lossless_formats_come_out_as_they_went_in(form: str) -> None:
    """What was saved without loss is what is decoded."""
    pixels = pixels_of(encoded(Image.fromarray(PIXELS), form))

    np.testing.assert_array_equal(pixels, PIXELS)


def test_jpeg_comes_out_nearly_as_it_went_in() -> None:
    """A JPEG of flat blocks is decoded to within its own loss."""
    pixels = pixels_of(encoded(Image.fromarray(PIXELS), "JPEG"))

    np.testing.assert_allclose(pixels.astype(int), PIXELS, atol=6)


def test_progressive_jpeg_is_read() -> None:
    """Progressive JPEGs are decoded like any other."""
    data = encoded(Image.fromarray(PIXELS), "JPEG", progressive=True)

    np.testing.assert_allclose(pixels_of(data).astype(int), PIXELS, atol=6)


@pytest.mark.parametrize("form", ["GIF", "WEBP"])
def test_animation_is_its_first_frame(form: str) -> None:
    """Of an animation the first frame is taken."""
    frames = [Image.fromarray(PIXELS), Image.fromarray(PIXELS[::-1].copy())]

    pixels = pixels_of(encoded(frames[0], form, save_all=True, append_images=frames[1:]))

    np.testing.assert_array_equal(pixels, PIXELS)


def test_second_picture_of_an_mpo_is_left_alone() -> None:
    """A phone's JPEG that carries a second picture is its first."""
    data = encoded(Image.fromarray(PIXELS), "MPO", save_all=True, append_images=[NOISE], quality=95, subsampling=0)

    np.testing.assert_allclose(pixels_of(data).astype(int), PIXELS, atol=6)


@pytest.mark.parametrize("form", FORMATS)
def test_header_tells_the_size(form: str) -> None:
    """Width and height are known before anything is decoded."""
    unread = read_header(encoded(Image.fromarray(PIXELS), form), MEGA)

    assert (unread.width, unread.height, unread.orientation) == (32, 16, 1)


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize(("form", "tolerance"), [("PNG", 0), ("WEBP", 0), ("JPEG", 6)])
def test_picture_is_turned_upright(form: str, tolerance: int, orientation: int) -> None:
    """Each EXIF orientation comes out as the scene was, and the header says the upright size."""
    data = encoded(Image.fromarray(turned(PIXELS, orientation)), form, exif=oriented(orientation))

    unread = read_header(data, MEGA)
    pixels = decode(unread, (32, 16))

    assert (unread.width, unread.height, unread.orientation) == (32, 16, orientation)
    np.testing.assert_allclose(pixels.astype(int), PIXELS, atol=tolerance)


@pytest.mark.parametrize(
    "exif",
    [
        b"Exif\0\0",
        b"Exif\0\0garbage",
        b"Exif\0\0II*\0",
        b"Exif\0\0II*\0\xff\xff\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\xff\xff\xff\xff\xff\xff\xff\xff",
        b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x02\0\0\0\x36\0\0\0\0\0\0\0",
        oriented(0).tobytes(),
        oriented(9).tobytes(),
        oriented(65535).tobytes(),
    ],
)
def test_exif_that_makes_no_sense_is_ignored(exif: bytes) -> None:
    """A broken EXIF block, or an orientation that does not exist, leaves the picture as stored."""
    unread = read_header(encoded(Image.fromarray(PIXELS), "JPEG", exif=exif), MEGA)

    assert unread.orientation == 1
    assert decode(unread, (32, 16)).shape == (16, 32, 3)


@pytest.mark.parametrize("endian", ["<", ">"])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_the_orientation_stands_among_other_tags(form: str, endian: str) -> None:
    """In either order of bytes."""
    exif = oriented(6)
    exif.endian = endian
    exif[ExifTags.Base.Make] = "maker"
    exif[ExifTags.Base.UserComment] = b"x" * 40

    assert read_header(encoded(Image.fromarray(PIXELS), form, exif=exif), MEGA).orientation == 6


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP"])
def test_a_hostile_exif_block_costs_nothing(form: str, mode: str) -> None:
    """Each of its tags claims the whole block: read as Pillow reads it, that is a hundred megabytes."""
    tags, size = 4900, 64_000
    entry = b"".join(struct.pack("<HHLL", 1000 + n, 7, size - 100, 8) for n in range(tags))
    exif = b"Exif\0\0II*\0" + struct.pack("<LH", 8, tags) + entry + bytes(size - len(entry) - 10)
    picture = Image.new(mode if form == "JPEG" else "RGB", (32, 16))
    data = encoded(picture, form, exif=exif)
    tracemalloc.start()
    unread = read_header(data, MEGA)
    decode(unread, (32, 16))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert unread.orientation == 1
    assert peak < 5_000_000


@pytest.mark.parametrize(("marker", "mark"), [(0xE1, b"Exif\0\0"), (0xE2, b"MPF\0")])
def test_pillow_parses_no_block_of_a_jpeg(marker: int, mark: bytes) -> None:
    """A CMYK picture is Pillow's to open; each tag of such a block claims all of it."""
    tags, size = 4900, 64_000
    entry = b"".join(struct.pack("<HHLL", 1000 + n, 7, size - 100, 8) for n in range(tags))
    block = mark + b"II*\0" + struct.pack("<LH", 8, tags) + entry + bytes(size - len(entry) - 10)
    plain = encoded(Image.new("CMYK", (32, 16)), "JPEG")
    tracemalloc.start()
    unread = read_header(plain[:2] + bytes((0xFF, marker)) + (len(block) + 2).to_bytes(2, "big") + block + plain[2:], MEGA)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()

    assert decode(unread, (32, 16)).shape == (16, 32, 3)
    assert peak < 5_000_000


def test_scans_count_by_the_pixels_they_visit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten scans are what encoders write; of a large picture, not many more are read."""
    data = encoded(Image.fromarray(PIXELS), "JPEG", progressive=True)
    assert read_header(data, MEGA)
    monkeypatch.setattr("app.image._MAX_SCANNED", 32 * 16 * 5)

    with pytest.raises(BrokenPicture, match="scans"):
        read_header(data, MEGA)


@pytest.mark.parametrize("form", ["PNG", "BMP", "GIF"])
def test_one_bit_is_black_and_white(form: str) -> None:
    """Mode 1 becomes 0 and 255."""
    bits = PIXELS[:, :, 0] > 127

    pixels = pixels_of(encoded(Image.fromarray(bits), form))

    np.testing.assert_array_equal(pixels, rgb(bits * 255))


@pytest.mark.parametrize("form", ["PNG", "BMP", "GIF"])
def test_grey_is_three_equal_channels(form: str) -> None:
    """Mode L is copied to each channel."""
    grey = PIXELS[:, :, 0]

    pixels = pixels_of(encoded(Image.fromarray(grey), form))

    np.testing.assert_array_equal(pixels, rgb(grey))


def test_grey_jpeg_is_three_equal_channels() -> None:
    """A JPEG of one channel is copied to all three."""
    pixels = pixels_of(encoded(Image.fromarray(PIXELS[:, :, 0]), "JPEG"))

    np.testing.assert_allclose(pixels.astype(int), rgb(PIXELS[:, :, 0]), atol=6)


@pytest.mark.parametrize("alpha", [0, 128, 255])
@pytest.mark.parametrize("form", ["PNG", "WEBP"])
def test_alpha_is_dropped(form: str, alpha: int) -> None:
    """Colours stay as stored, however transparent they are."""
    pixels = np.dstack([PIXELS, np.full(PIXELS.shape[:2], alpha, np.uint8)])

    data = encoded(Image.fromarray(pixels), form, exact=True)

    np.testing.assert_array_equal(pixels_of(data), PIXELS)


def test_alpha_of_grey_is_dropped() -> None:
    """Mode LA is its grey."""
    grey = PIXELS[:, :, 0]

    pixels = pixels_of(encoded(Image.fromarray(np.dstack([grey, grey // 2])), "PNG"))

    np.testing.assert_array_equal(pixels, rgb(grey))


@pytest.mark.parametrize("form", ["PNG", "BMP", "GIF"])
def test_palette_is_looked_up(form: str) -> None:
    """Mode P becomes the colours its palette says."""
    palette = Image.fromarray(PIXELS).quantize(8)

    np.testing.assert_array_equal(pixels_of(encoded(palette, form)), np.asarray(palette.convert("RGB")))


@pytest.mark.parametrize(
    ("form", "transparency"),
    [("PNG", 0), ("PNG", 3), ("PNG", bytes(range(8))), ("PNG", b"\0" * 8), ("GIF", 0), ("GIF", 3)],
)
def test_transparent_palette_entries_keep_their_colour(form: str, transparency: int | bytes) -> None:
    """A palette with transparency, one index or a table, loses only the transparency, and without a warning."""
    palette = Image.fromarray(PIXELS).quantize(8)

    pixels = pixels_of(encoded(palette, form, transparency=transparency))

    np.testing.assert_array_equal(pixels, np.asarray(palette.convert("RGB")))


def test_palette_with_alpha_keeps_its_colours() -> None:
    """Mode PA is what its palette says."""
    palette = Image.fromarray(PIXELS).quantize(8)
    expected = np.asarray(palette.convert("RGB"))

    np.testing.assert_array_equal(from_memory(palette.convert("PA")), expected)


@pytest.mark.parametrize("transparency", [0, (10, 20, 30)])
def test_transparent_colour_of_a_true_colour_png_is_kept(transparency: int | tuple[int, int, int]) -> None:
    """A PNG that names one colour transparent still shows it."""
    mode = "RGB" if isinstance(transparency, tuple) else "L"
    picture = Image.new(mode, (4, 4), transparency)

    pixels = pixels_of(encoded(picture, "PNG", transparency=transparency))

    np.testing.assert_array_equal(pixels, np.asarray(picture.convert("RGB")))


@pytest.mark.parametrize("colour", [(255, 0, 0), (0, 255, 0), (30, 60, 90)])
def test_cmyk_jpeg_is_converted(colour: tuple[int, int, int]) -> None:
    """A print JPEG shows the colours that were put in, not their negative."""
    data = encoded(Image.new("RGB", (16, 16), colour).convert("CMYK"), "JPEG")

    np.testing.assert_allclose(pixels_of(data).astype(int), np.full((16, 16, 3), colour), atol=6)


def test_sixteen_bit_grey_is_scaled() -> None:
    """A ramp over all 65536 values becomes one over 256; nothing clips to white."""
    ramp = np.arange(65536, dtype=np.uint16).reshape(256, 256)

    pixels = pixels_of(png(256, 256, 16, GREY, ramp.astype(">u2").tobytes()))

    np.testing.assert_array_equal(pixels, rgb(ramp >> 8))


@pytest.mark.parametrize(("colour", "channels"), [(GREY_ALPHA, 2), (RGB, 3), (RGBA, 4)])
def test_other_sixteen_bit_modes_are_scaled(colour: int, channels: int) -> None:
    """Grey with alpha, RGB and RGBA of 16 bits a channel keep their upper byte."""
    values = np.random.default_rng(3).integers(0, 65536, (8, 8, channels), np.uint16)

    pixels = pixels_of(png(8, 8, 16, colour, values.astype(">u2").tobytes()))

    high = (values >> 8).astype(np.uint8)
    np.testing.assert_array_equal(pixels, rgb(high[:, :, 0]) if channels == 2 else high[:, :, :3])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("percent", range(5, 100, 5))
def test_truncated_picture_is_broken(form: str, percent: int) -> None:
    """A file cut anywhere in its header or pixels is refused as broken."""
    data = encoded(NOISE, form)
    cut = data[: len(data) * percent // 100]

    with pytest.raises(BrokenPicture):
        pixels_of(cut)


@pytest.mark.parametrize("form", FORMATS)
def test_short_header_is_refused(form: str) -> None:
    """However few bytes of a file arrive, the answer is that it is no picture or a broken one."""
    data = encoded(NOISE, form)

    for length in range(40):
        with pytest.raises((UnsupportedFormat, BrokenPicture)):
            pixels_of(data[:length])


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\0",
        b"GIF",
        b"%PDF-1.7",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"II*\0",
        b"RIFF\0\0\0\0WAVE",
        b"not a picture",
    ],
)
def test_other_formats_are_unsupported(data: bytes) -> None:
    """What does not begin like one of the five formats is named as such."""
    with pytest.raises(UnsupportedFormat, match="none of JPEG, PNG, WEBP, GIF, BMP"):
        read_header(data, MEGA)


def test_tiff_is_unsupported() -> None:
    """A format that Pillow reads and we do not stays closed."""
    with pytest.raises(UnsupportedFormat):
        read_header(encoded(NOISE, "TIFF"), MEGA)


def test_broken_header_names_the_format() -> None:
    """A right beginning with nonsense behind it is broken, not unsupported."""
    with pytest.raises(BrokenPicture, match="the PNG header"):
        read_header(b"\x89PNG\r\n\x1a\n" + b"\xff" * 50, MEGA)


@pytest.mark.parametrize(("width", "height"), [(0, 0), (0, 10), (10, 0)])
def test_picture_without_pixels_is_broken(width: int, height: int) -> None:
    """A side of zero is refused."""
    with pytest.raises(BrokenPicture):
        read_header(png(width, height, 8, GREY), MEGA)


def tolerant(data: bytes) -> None:
    """Read as the gateway does; nothing but its own errors may come out."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            unread = read_header(data, MEGA)
            picture = decode(unread, (unread.width, unread.height))
        except GatewayError:
            return
    assert picture.shape == (unread.height, unread.width, 3)


@settings(max_examples=200, deadline=None)
@given(st.sampled_from([b"", b"\xff\xd8\xff", b"\x89PNG\r\n\x1a\n", b"RIFF\0\0\0\0WEBP", b"GIF89a", b"GIF87a", b"BM"]), st.binary())
def test_random_bytes_raise_only_our_errors(magic: bytes, rest: bytes) -> None:
    """Whatever follows a format's first bytes, only a gateway error escapes."""
    tolerant(magic + rest)


@pytest.mark.parametrize("form", FORMATS)
def test_damaged_files_raise_only_our_errors(form: str) -> None:
    """A real file with bytes overwritten decodes or raises a gateway error."""
    data = encoded(Image.fromarray(PIXELS), form, **({} if form in {"GIF", "BMP"} else {"exif": oriented(6)}))
    chance = random.Random(form)  # noqa: S311

    for _ in range(300):
        damaged = bytearray(data)
        for _ in range(chance.randint(1, 4)):
            damaged[chance.randrange(min(len(data), 200))] = chance.choice((0, 1, 0x7F, 0xFF, chance.randrange(256)))
        tolerant(bytes(damaged))


def test_pixel_limit_is_inclusive() -> None:
    """A picture of just the limit is read, one more row is not."""
    assert read_header(png(100, 50, 8, GREY), 5000).height == 50

    with pytest.raises(PictureTooLarge, match="100 x 51 pixels"):
        read_header(png(100, 51, 8, GREY), 5000)


@pytest.mark.parametrize(("width", "height"), [(13000, 13000), (16000, 16000), (2**31 - 1, 2**31 - 1)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bomb_is_refused_by_its_header(width: int, height: int) -> None:
    """A small file that would unpack to gigabytes is too large, also beyond Pillow's own limit."""
    data = png(width, height, 1, GREY)

    with pytest.raises(PictureTooLarge, match="the limit is 50 megapixels"):
        read_header(data, 50 * MEGA)


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_only_our_own_limit_counts() -> None:
    """A picture that Pillow would warn of is read where the limit allows it."""
    unread = read_header(png(13000, 13000, 1, GREY), 178 * MEGA)

    assert (unread.width, unread.height) == (13000, 13000)


@pytest.mark.parametrize(("width", "height"), [(MAX_SIDE, 164), (164, MAX_SIDE), (100, 1), (1, 100), (1, 1)])
def test_sides_at_their_limits_are_read(width: int, height: int) -> None:
    """The longest side and the most extreme proportions are still a picture."""
    unread = read_header(png(width, height, 8, GREY), 3 * MEGA)

    assert (unread.width, unread.height) == (width, height)


@pytest.mark.parametrize(("width", "height"), [(MAX_SIDE + 1, 200), (200, MAX_SIDE + 1), (101, 1), (1, 101), (1000, 9)])
def test_sides_beyond_their_limits_are_refused(width: int, height: int) -> None:
    """Sides no detector can use are refused with the limits."""
    with pytest.raises(PictureSides, match=f"{width} x {height} pixels; the limits are 16384 pixels a side and 100 : 1"):
        read_header(png(width, height, 8, GREY), 50 * MEGA)


def gradient(width: int, height: int) -> NDArray[np.uint8]:
    across = np.linspace(0, 255, width, dtype=np.uint8)
    down = np.linspace(0, 255, height, dtype=np.uint8)
    return np.dstack([np.tile(across, (height, 1)), np.tile(down[:, None], (1, width)), np.full((height, width), 99, np.uint8)])


@pytest.mark.parametrize("at_least", [(600, 450), (1000, 400), (200, 750)])
@pytest.mark.parametrize("orientation", [1, 3, 6, 7])
def test_large_jpeg_comes_back_smaller(orientation: int, at_least: tuple[int, int]) -> None:
    """A JPEG is decoded at a fraction of its size, never below what is needed, and upright all the same."""
    data = encoded(Image.fromarray(turned(gradient(4000, 3000), orientation)), "JPEG", exif=oriented(orientation))

    unread = read_header(data, 12 * MEGA)
    picture = decode(unread, at_least)

    assert (unread.width, unread.height) == (4000, 3000)
    assert picture.shape == (750, 1000, 3)
    np.testing.assert_allclose(picture.astype(int), gradient(1000, 750), atol=6)


@pytest.mark.parametrize(
    ("at_least", "size"),
    [
        ((1600, 1200), (1600, 1200)),
        ((801, 600), (1600, 1200)),
        ((800, 600), (800, 600)),
        ((200, 150), (200, 150)),
        ((1, 1), (200, 150)),
    ],
)
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
def test_jpeg_is_never_smaller_than_needed(mode: str, at_least: tuple[int, int], size: tuple[int, int]) -> None:
    """The reduction is the largest of 1, 2, 4 and 8 that leaves both sides long enough."""
    unread = read_header(encoded(Image.new(mode, (1600, 1200)), "JPEG"), 2 * MEGA)

    assert decode(unread, at_least).shape[1::-1] == size


def test_large_mpo_comes_back_smaller() -> None:
    """A phone's JPEG with a second picture is reduced like any other."""
    data = encoded(Image.new("RGB", (1600, 1200)), "MPO", save_all=True, append_images=[NOISE])

    assert decode(read_header(data, 2 * MEGA), (600, 450)).shape == (600, 800, 3)


@pytest.mark.parametrize("form", ["PNG", "WEBP", "BMP", "GIF"])
def test_other_formats_keep_their_size(form: str) -> None:
    """Only JPEG can be decoded smaller."""
    assert decode(read_header(encoded(NOISE, form), MEGA), (4, 4)).shape == (48, 64, 3)


@pytest.mark.parametrize(("version", "simd"), [("12.1.1.post0", True), ("9.5.0.post2", True), ("12.1.1", False), ("13.0.0", False)])
def test_simd_is_told_by_the_version(monkeypatch: pytest.MonkeyPatch, version: str, *, simd: bool) -> None:
    """Pillow-SIMD marks its releases as post-releases of Pillow's."""
    monkeypatch.setattr("PIL.__version__", version)

    assert is_simd() is simd
