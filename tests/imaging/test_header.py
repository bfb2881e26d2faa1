"""Headers: format, size and orientation, and images that are rejected because of their headers."""

import random
import struct
import zlib

import numpy as np
import pytest
from PIL import Image
from PIL.GifImagePlugin import GifImageFile

from app.errors import ImageTooLarge, InvalidImage, InvalidImageDimensions, UnsupportedFormat
from app.imaging import apart
from app.imaging.header import MAX_ASPECT, MAX_SIDE, PixelLimits, count_pixels, identify, read_header
from tests.imaging.samples import (
    FORMATS,
    GREY,
    HEIC,
    MEGA,
    NOISE,
    PIXELS,
    encode,
    hostile_tags,
    insert_segment,
    limits,
    peak_below,
    pixels_of,
    png,
    png_chunk,
)

RED = Image.new("RGB", (64, 64), "red")
LIMITS = PixelLimits(jpeg=2_000_000, non_jpeg=1_000_000)
FILL = bytes(1 << 14)
"""Appended to a JPEG, so that `count_pixels` does not ignore it as a small one."""


@pytest.mark.parametrize(("mode", "is_open"), [("RGB", False), ("L", False), ("CMYK", True)])
def test_pillow_opens_only_unusual_jpegs(mode: str, *, is_open: bool) -> None:
    header = read_header(encode(Image.new(mode, (32, 16)), "JPEG"), limits(MEGA))

    assert (header.file is not None) is is_open


@pytest.mark.parametrize(("marker", "identifier"), [(0xE1, b"Exif\0\0"), (0xE2, b"MPF\0")])
def test_pillow_does_not_parse_the_blocks_of_a_jpeg(marker: int, identifier: bytes) -> None:
    """Each tag claims the whole block. Pillow opens this JPEG because it is CMYK."""
    data = insert_segment(encode(Image.new("CMYK", (32, 16)), "JPEG"), marker, identifier + hostile_tags())

    with peak_below(5_000_000):
        assert pixels_of(data).shape == (16, 32, 3)


@pytest.mark.parametrize(
    "chunk",
    [
        png_chunk(b"zTXt", b"a\0\0" + zlib.compress(bytes(1_000_000))),
        png_chunk(b"iCCP", b"a\0\0" + zlib.compress(bytes(1_000_000))),
        png_chunk(b"cHRM", bytes(100_000)),
    ],
    ids=["text", "profile", "chromaticities"],
)
def test_pillow_does_not_parse_the_texts_and_profiles_of_a_png(chunk: bytes) -> None:
    """The chunks would take many times their size, before the pixels or after them."""
    plain = encode(Image.fromarray(PIXELS), "PNG")
    for at in (33, plain.index(b"IEND") - 4):
        with peak_below(800_000):
            pixels = pixels_of(plain[:at] + chunk + plain[at:])

        np.testing.assert_array_equal(pixels, PIXELS)


def test_second_frame_of_a_gif_takes_no_memory() -> None:
    data = encode(Image.new("P", (32, 16), 3), "GIF", disposal=2, transparency=0)

    header = read_header(data, limits(MEGA))

    assert isinstance(header.file, GifImageFile)
    assert header.file.dispose is None


def write_bmp(header: bytes, pixels: bytes) -> bytes:
    start = 14 + len(header) + 1024
    return struct.pack("<2sIII", b"BM", start + len(pixels), 0, start) + header + bytes(range(1, 5)) * 256 + pixels


@pytest.mark.parametrize("size", [40, 64, 108, 124], ids=["Windows 3", "OS/2 2", "Windows 4", "Windows 5"])
@pytest.mark.parametrize(("compression", "depth"), [(1, 8), (2, 4)])
def test_compressed_bmp_is_refused(size: int, compression: int, depth: int) -> None:
    """Pillow would decode it in Python: eight seconds for a file of 13 KB. Without compression, it is accepted."""
    header = struct.pack("<IiiHHI", size, 32, 16, 1, depth, compression).ljust(size, b"\0")
    assert read_header(write_bmp(header[:16] + bytes(4) + header[20:], bytes(512)), limits(MEGA)).width == 32

    with pytest.raises(UnsupportedFormat, match="the BMP is compressed"):
        read_header(write_bmp(header, b"\x20\1\0\0" * 16), limits(MEGA))


def resize_header(jpeg: bytes, width: int, height: int) -> bytes:
    """Change the size in the frame header of a progressive JPEG."""
    at = jpeg.index(b"\xff\xc2") + 5
    return jpeg[:at] + height.to_bytes(2, "big") + width.to_bytes(2, "big") + jpeg[at + 4 :]


def test_scans_count_by_the_pixels_they_visit() -> None:
    """Ten scans, as encoders write them, are accepted at any size; a smaller image may have more."""
    data = encode(Image.fromarray(PIXELS), "JPEG", progressive=True)
    assert data.count(b"\xff\xda") == 10

    assert read_header(resize_header(data, 10_000, 5_000), limits(50 * MEGA)).height == 5_000
    scan = data[data.rindex(b"\xff\xda") : -2]
    data = data[:-2] + 80 * scan + data[-2:]
    assert read_header(resize_header(data, 5_000, 2_000), limits(50 * MEGA)).height == 2_000
    with pytest.raises(InvalidImage, match="too many scans for its size"):
        read_header(resize_header(data, 5_000, 2_001), limits(50 * MEGA))


OTHERS = [
    b"",
    b"\0",
    b"\xff",
    b"GIF",
    b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    b"RIFF\0\0\0\0WAVE",
    b"not an image",
]
OTHER_JPEGS = [b"\0\0\0\x0cjP  \r\n\x87\n", b"\0\0\0\x0cJXL \r\n\x87\n", b"\xff\x4f\xff\x51", b"\xff\x0a"]


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        *((data, UnsupportedFormat, r"supported format \(JPEG, PNG, WEBP, GIF, BMP, AVIF, HEIC, TIFF\)") for data in OTHERS),
        *((data + bytes(50), UnsupportedFormat, "JPEG 2000 or JPEG XL") for data in OTHER_JPEGS),
        (b"%PDF-1.7\n%\xe2\xe3", UnsupportedFormat, "the data is a PDF, not an image"),
        (b"\x89PNG\r\n\x1a\n" + b"\xff" * 50, InvalidImage, "the PNG header"),
        *((png(*size, 8, GREY), InvalidImage, "the PNG header") for size in ((0, 0), (0, 10), (10, 0))),
    ],
)
def test_unsupported_data_or_invalid_header_is_refused(data: bytes, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_header(data, limits(MEGA))


def test_pixel_limit_is_inclusive() -> None:
    assert read_header(png(100, 50, 8, GREY), limits(5000)).height == 50

    with pytest.raises(ImageTooLarge, match="100 x 51 pixels"):
        read_header(png(100, 51, 8, GREY), limits(5000))


@pytest.mark.parametrize("image_format", FORMATS)
def test_only_a_jpeg_may_have_the_pixels_of_scalable_formats(image_format: str) -> None:
    """Other images are decoded at their full size, which takes more memory. Pillow reduces a JPEG that is CMYK."""
    data = encode(NOISE.convert("CMYK") if image_format == "JPEG" else NOISE, image_format)
    most = NOISE.width * NOISE.height * (2 if image_format == "AVIF" else 1)
    assert read_header(data, PixelLimits(jpeg=most, non_jpeg=most)).height == NOISE.height

    small = PixelLimits(0, most) if image_format == "JPEG" else PixelLimits(most, 0)
    with pytest.raises(ImageTooLarge, match=f"the limit is 0 megapixels for {image_format}"):
        read_header(data, small)


@pytest.mark.parametrize(("width", "height"), [(13000, 13000), (16000, 16000), (2**31 - 1, 2**31 - 1)])
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bomb_is_refused_by_its_header(width: int, height: int) -> None:
    data = png(width, height, 1, GREY)

    with pytest.raises(ImageTooLarge, match="the limit is 50 megapixels"):
        read_header(data, limits(50 * MEGA))


@pytest.mark.parametrize(
    ("width", "height"),
    [(MAX_SIDE, 164), (164, MAX_SIDE), (MAX_ASPECT, 1), (1, MAX_ASPECT), (1, 1), (13000, 13000)],
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_dimensions_at_their_limits_are_accepted(width: int, height: int) -> None:
    """Pillow's own limit, at which it would warn, does not count."""
    header = read_header(png(width, height, 1, GREY), limits(178 * MEGA))

    assert (header.width, header.height) == (width, height)


@pytest.mark.parametrize(("width", "height"), [(MAX_SIDE + 1, 200), (200, MAX_SIDE + 1), (101, 1), (1, 101), (1000, 9)])
def test_dimensions_beyond_their_limits_are_refused(width: int, height: int) -> None:
    message = f"{width} x {height} pixels; the limits are 16384 pixels a side and 100 : 1"
    with pytest.raises(InvalidImageDimensions, match=message):
        read_header(png(width, height, 8, GREY), limits(50 * MEGA))


@pytest.mark.parametrize("image_format", FORMATS)
def test_format_is_recognised_by_the_first_bytes(image_format: str) -> None:
    """A file that is valid in two formats has that of its first bytes."""
    assert identify(encode(RED, image_format)) == image_format
    assert identify(encode(RED, image_format) + b"PK\x03\x04") == image_format


@pytest.mark.parametrize("brand", [b"heic", b"heix", b"mif1", b"hevc"])
def test_a_heic_is_told_where_pi_heif_is_not_installed(brand: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\0\0\0\x1cftyp" + brand + b"\0\0\0\0mif1heicmiaf" + bytes(50)
    assert identify(data) == "HEIC"

    monkeypatch.setattr(apart, "HAS_HEIC", False)
    with pytest.raises(UnsupportedFormat, match=r"which pi-heif must be installed: pip install 'nereid-gateway\[heic\]'"):
        identify(data)


@pytest.mark.parametrize("brands", [b"avif\0\0\0\0", b"mif1\0\0\0\0mif1avif", b"avis\0\0\0\0"])
def test_an_avif_is_recognised_by_any_of_its_brands(brands: bytes) -> None:
    """The first brand may be a general one, such as `mif1`."""
    assert identify(b"\0\0\0\x1cftyp" + brands + bytes(50)) == "AVIF"


def comment(blocks: int) -> bytes:
    """Write a comment of a GIF in this many blocks of 255 bytes."""
    return b"!\xfe" + (b"\xff" + b"x" * 255) * blocks + b"\0"


@pytest.mark.parametrize(
    ("some", "many"),
    [
        (comment(4000), comment(5000)),
        (comment(10), comment(50_000)),
        (b"!\xfe\x01x\0" * 2000, b"!\xfe\x01x\0" * 10_000),
        (b"!\x01\0" * 5000, b"!\x01\0" * 20_000),
        (b"", b"!\xfe" + b"\x01x" * 100_000 + b"\0"),
    ],
    ids=["a mebibyte", "comment", "small comments", "small extensions", "small blocks"],
)
def test_gif_with_too_much_before_its_first_frame_is_refused(some: bytes, many: bytes) -> None:
    """Each extension takes time to parse, and Pillow would join comments in quadratic time."""
    plain = encode(RED, "GIF")
    start = plain.index(b",\0\0\0\0")

    assert identify(plain[:start] + some + plain[start:]) == "GIF"
    with pytest.raises(InvalidImage, match="first frame"):
        identify(plain[:start] + many + plain[start:])


@pytest.mark.parametrize(
    ("chunk", "some", "many"),
    [
        (png_chunk(b"tEXt", b"a\0b"), 50, 200),
        (png_chunk(b"IDAT"), 15_000, 30_000),
        (png_chunk(b"fdAT", bytes(8)), 15_000, 30_000),
    ],
    ids=["text", "pixels", "animation"],
)
def test_png_with_too_many_chunks_is_refused(chunk: bytes, some: int, many: int) -> None:
    """Pillow reads chunks one by one, wherever they are in the file."""
    plain = encode(RED, "PNG")
    for at in (33, plain.index(b"IDAT") - 4, plain.index(b"IEND") - 4):
        assert identify(plain[:at] + chunk * some + plain[at:]) == "PNG"
        with pytest.raises(InvalidImage, match="chunks"):
            identify(plain[:at] + chunk * many + plain[at:])


def test_chunks_behind_the_end_of_a_png_do_not_count() -> None:
    """No decoder reads the bytes after the last chunk."""
    assert identify(encode(RED, "PNG") + png_chunk(b"tEXt", b"a\0b") * 200) == "PNG"


@pytest.mark.parametrize("chunk", [b"abcd\0\0\0\0", b"ANMF\x03\0\0\0abc\0"], ids=["empty", "odd"])
def test_webp_with_too_many_chunks_is_refused(chunk: bytes) -> None:
    """The decoder keeps a record of each chunk."""
    plain = encode(RED, "WEBP")

    assert identify(plain + chunk * 15_000) == "WEBP"
    with pytest.raises(InvalidImage, match="chunks"):
        identify(plain + chunk * 30_000)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        *((name, {}) for name in ("JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP")),
        ("JPEG", {"progressive": True}),
        ("WEBP", {"lossless": False}),
        ("WEBP", {"exif": b"Exif\0\0II*\0\x08\0\0\0\0\0"}),
    ],
)
@pytest.mark.parametrize("size", [(1, 1), (300, 200), (5000, 17)])
def test_every_format_tells_its_size(name: str, options: dict[str, object], size: tuple[int, int]) -> None:
    data = encode(Image.new("RGB", size, "teal"), name, **options) + FILL

    assert count_pixels(data, LIMITS) == size[0] * size[1]


def test_a_bmp_may_be_stored_from_top_to_bottom() -> None:
    """The height in the header is negative then."""
    data = bytearray(encode(Image.new("RGB", (30, 20)), "BMP"))
    data[22:26] = (-20).to_bytes(4, "little", signed=True)

    assert count_pixels(bytes(data), LIMITS) == 600


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF"])
def test_a_truncated_image_has_no_pixels_or_its_own(name: str) -> None:
    data = encode(Image.new("RGB", (30, 20)), name, **({"exif": FILL} if name == "JPEG" else {}))

    assert {count_pixels(data[:length], LIMITS) for length in range(len(data))} <= set(range(601))


def test_an_avif_and_a_heic_tell_their_size() -> None:
    """A HEIC may tell that of its frame, which is larger."""
    assert count_pixels(encode(Image.new("RGB", (300, 200)), "AVIF"), LIMITS) == 60_000
    assert count_pixels(HEIC, LIMITS) == 64 * 64


def test_data_that_is_no_image_has_no_pixels() -> None:
    assert count_pixels(b"", LIMITS) == count_pixels(b"no image at all" * 10, LIMITS) == 0
    noise = random.Random(0)  # noqa: S311 - no secret
    for magic in (
        b"\xff\xd8\xff",
        b"\x89PNG",
        b"GIF8",
        b"BM",
        b"II*\0\x08\0\0\0",
        b"\0\0\0\x0cftypavifispe\0\0\0\0",
        b"RIFF\0\0\0\0WEBPVP8X",
        b"RIFF\0\0\0\0WEBPVP8L",
        b"RIFF\0\0\0\0WEBPVP8 ",
    ):
        for length in range(60):
            assert count_pixels(magic + noise.randbytes(length), LIMITS) >= 0


@pytest.mark.parametrize("mode", ["L", "CMYK", "RGB"])
def test_a_jpeg_tells_its_size_whatever_its_colours_and_however_late(mode: str) -> None:
    """Pillow decodes CMYK, which takes longest; segments before the frame may be large."""
    data = encode(Image.new(mode, (300, 200)), "JPEG")
    segments = b"".join(b"\xff\xed" + (60_002).to_bytes(2) + bytes(60_000) for _ in range(3))

    assert count_pixels(data[:2] + segments + data[2:], LIMITS) == 60_000


def test_a_jpeg_is_not_searched_beyond_its_first_scan() -> None:
    """The search would take long, and a scan without a frame header cannot be decoded."""
    data = encode(Image.new("RGB", (300, 200)), "JPEG")
    at = data.index(b"\xff\xc0")
    scan = b"\xff\xda\0\x08" + bytes(6)

    assert count_pixels(data + FILL, LIMITS) == 60_000
    assert count_pixels(data[:at] + scan + data[at:] + FILL, LIMITS) == 0


@pytest.mark.parametrize("tag", [256, 257])
def test_a_tiff_that_repeats_its_size_costs_nothing(tag: int) -> None:
    long = struct.pack("<HHLL", tag, 3, 20_000, 8 + 2 + 12 * 511 + 4) * 511
    data = b"II*\0" + struct.pack("<LH", 8, 511) + long + bytes(4) + bytes(40_000)
    with peak_below(10_000):
        assert count_pixels(data, LIMITS) == 0

    entries = [(256, 30), (257, 20)] + [(256, 1), (257, 1)] * 100
    tags = b"".join(struct.pack("<HHLL", name, 4, 1, value) for name, value in entries)
    assert count_pixels(b"II*\0" + struct.pack("<LH", 8, len(entries)) + tags, LIMITS) == 600


@pytest.mark.parametrize(
    ("image", "name", "behind", "pixels"),
    [
        (Image.new("L", (300, 200)), "JPEG", b"", 0),  # a small file, which has few pixels unless it has another format
        (Image.new("1", (1000, 1000)), "PNG", b"", 1_000_000),
        (Image.new("L", (1001, 1000)), "PNG", b"", 0),  # will be rejected
        (Image.new("L", (2000, 1000)), "JPEG", FILL, 2_000_000),
        (Image.new("L", (2001, 1000)), "JPEG", FILL, 0),
    ],
)
def test_pixels_count_within_the_limits(image: Image.Image, name: str, behind: bytes, pixels: int) -> None:
    assert count_pixels(encode(image, name) + behind, LIMITS) == pixels
