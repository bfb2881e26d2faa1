"""Headers: format and size, and images that are rejected because of their headers."""

import struct
import zlib

import numpy as np
import pytest
from PIL import ExifTags, Image

from app.errors import ImageTooLarge, InvalidImage, InvalidImageDimensions, UnsupportedFormat
from app.imaging import apart
from app.imaging.exif import read_orientation
from app.imaging.header import MAX_SIDE, PixelLimits, count_pixels, identify, read_header
from app.imaging.heif import find_size
from tests.imaging.samples import FORMATS, GREY, HEIC, MEGA, NOISE, PIXELS, encode, exif_of, hostile_tags, pixels_of, png, png_chunk
from tests.support import peak_below

LIMITS = PixelLimits(jpeg=2_000_000, non_jpeg=1_000_000)
FILL = bytes(1 << 14)
"""Appended to a JPEG, so that `count_pixels` does not ignore it as a small one."""


def test_pillow_parses_no_blocks_that_claim_much() -> None:
    """Each tag of a JPEG's block claims the whole block, and a PNG's chunks would take many times their size."""
    data, tags, segment = encode(Image.new("CMYK", (32, 16)), "JPEG"), hostile_tags(), b"\xff\xe2%bMPF\0%b"
    length = len(segment % (b"", tags)).to_bytes(2)
    with peak_below(5_000_000):
        assert pixels_of(data[:2] + segment % (length, tags) + data[2:]).shape == (16, 32, 3)
    plain = encode(Image.fromarray(PIXELS), "PNG")
    for name in (b"zTXt", b"iCCP"):
        chunk = png_chunk(name, b"a\0\0" + zlib.compress(bytes(1_000_000)))
        for at in (33, plain.index(b"IEND") - 4):
            with peak_below(800_000):
                pixels = pixels_of(plain[:at] + chunk + plain[at:])
            np.testing.assert_array_equal(pixels, PIXELS)


def bmp(compression: int, size: int = 40) -> bytes:
    depth, pixels = (4, b"\x20\1\0\0" * 16) if compression == 2 else (8, bytes(512))
    header = struct.pack("<IiiHHI", size, 32, 16, 1, depth, compression).ljust(size, b"\0")
    start = 14 + size + 1024
    return struct.pack("<2sIII", b"BM", start + len(pixels), 0, start) + header + bytes(range(1, 5)) * 256 + pixels


def scans(width: int, height: int, more: int) -> bytes:
    """Make a progressive JPEG of ten scans and more; a decoder visits each pixel in each."""
    data = encode(Image.fromarray(PIXELS), "JPEG", progressive=True)
    at = data.index(b"\xff\xc2") + 5
    data = data[:at] + height.to_bytes(2) + width.to_bytes(2) + data[at + 4 :]
    return data[:-2] + more * data[data.rindex(b"\xff\xda") : -2] + data[-2:]


def inserted(plain: bytes, at: int, part: bytes, count: int) -> bytes:
    return plain[:at] + part * count + plain[at:]


GIF, PNG, WEBP = (encode(Image.new("RGB", (64, 64), "red"), name) for name in ("GIF", "PNG", "WEBP"))
FRAME, IDAT, IEND = GIF.index(b",\0\0\0\0"), PNG.index(b"IDAT") - 4, PNG.index(b"IEND") - 4
TEXT, FRAME_DATA = png_chunk(b"tEXt", b"a\0b"), png_chunk(b"fdAT", bytes(8))
COMMENT = b"\xff" + b"x" * 255


@pytest.mark.parametrize(
    "data",
    [
        png(MAX_SIDE, 164, 1, GREY),
        png(13000, 13000, 1, GREY),  # Pillow's own limit, at which it would warn, does not count
        scans(10_000, 5_000, 0),
        scans(5_000, 2_000, 80),
        inserted(GIF, FRAME, b"!\xfe" + COMMENT * 4000 + b"\0", 1),
        inserted(PNG, 33, TEXT, 90),
        inserted(PNG, IDAT, png_chunk(b"IDAT"), 15_000),
        PNG + TEXT * 200,  # no decoder reads what is after the last chunk
        WEBP + b"ANMF\x03\0\0\0abc\0" * 15_000,
    ],
    ids=lambda data: f"{data[:3]!r}, {len(data)}",
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_file_at_the_limits_is_accepted(data: bytes) -> None:
    assert identify(data)
    if data[:3] not in {b"RIF", b"GIF"}:  # Pillow looks for what is not there
        read_header(data, PixelLimits(50 * MEGA, 178 * MEGA))


@pytest.mark.parametrize(
    ("data", "error", "message"),
    [
        (b"RIFF\0\0\0\0WAVE", UnsupportedFormat, r"\(JPEG, PNG, WEBP, GIF, BMP, AVIF, HEIC, TIFF\)"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", UnsupportedFormat, "JPEG 2000 or JPEG XL"),
        (b"%PDF-1.7\n%\xe2\xe3", UnsupportedFormat, "the data is a PDF, not an image"),
        (b"\x89PNG\r\n\x1a\n" + b"\xff" * 50, InvalidImage, "the PNG header"),
        (
            png(MAX_SIDE + 1, 200, 8, GREY),
            InvalidImageDimensions,
            "16385 x 200 pixels; the limits are 16384 pixels a side and 100 : 1",
        ),
        (png(101, 1, 8, GREY), InvalidImageDimensions, "100 : 1"),
        (png(2**31 - 1, 2**31 - 1, 1, GREY), ImageTooLarge, "the limit is 178 megapixels"),
        # Pillow would decode them in Python: eight seconds for a file of 13 KB.
        *((bmp(kind, size), UnsupportedFormat, "the BMP is compressed") for kind, size in ((1, 40), (2, 124))),
        (scans(5_000, 2_001, 80), InvalidImage, "too many scans for its size"),
        # Each part takes time to parse, and some take memory; Pillow would join comments in quadratic time.
        (inserted(GIF, FRAME, b"!\xfe" + COMMENT * 5000 + b"\0", 1), InvalidImage, "too many"),
        (inserted(GIF, FRAME, b"!\x01\0", 20_000), InvalidImage, "too many"),
        (inserted(GIF, FRAME, b"!\xfe" + b"\x01x" * 100_000 + b"\0", 1), InvalidImage, "too many"),
        (inserted(PNG, 33, TEXT, 30_000), InvalidImage, "too many"),
        (inserted(PNG, IEND, FRAME_DATA, 30_000), InvalidImage, "too many"),
        (WEBP + b"abcd\0\0\0\0" * 30_000, InvalidImage, "too many"),
        *((inserted(PNG, at, part, 1), InvalidImage, "PNG header") for at, part in ((8, TEXT), (33, PNG[8:33]))),
        (inserted(HEIC, HEIC.index(b"meta") - 4, b"\0\0\0\x08free", 600), InvalidImage, "the HEIC has no image"),
        (WEBP + b"ANMF\x03\0\0\0abc\0" * 30_000, InvalidImage, "too many"),
    ],
    ids=lambda value: f"{value[:3]!r}, {len(value)}" if isinstance(value, bytes) else "",
)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_file_beyond_the_limits_is_refused(data: bytes, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read_header(data, PixelLimits(50 * MEGA, 178 * MEGA))


def test_heic_of_8_bits_and_few_colours_may_have_twice_the_pixels() -> None:
    """That is what phones write. Source: ISO/IEC 14496-15, 8.3.2."""
    at = HEIC.index(b"hvcC") + 20
    width, height = find_size(HEIC)
    limit = PixelLimits(jpeg=width * height, non_jpeg=width * height // 2)
    simple, deep = (HEIC[:at] + bytes([0xFC | 1, 0xF8 | bits]) + HEIC[at + 2 :] for bits in (0, 2))
    read_header(simple, limit)
    for other in (HEIC, deep):
        with pytest.raises(ImageTooLarge):
            read_header(other, limit)


@pytest.mark.parametrize("image_format", FORMATS)
def test_each_format_has_its_inclusive_limit_of_pixels(image_format: str) -> None:
    """Only a JPEG is decoded at a reduced size, also by Pillow if it is CMYK; others take more memory."""
    data = encode(NOISE.convert("CMYK") if image_format == "JPEG" else NOISE, image_format)
    most = NOISE.width * NOISE.height * (2 if image_format == "AVIF" else 1)
    accepted, refused = (PixelLimits(limit, 0) if image_format == "JPEG" else PixelLimits(0, limit) for limit in (most, most - 1))
    assert identify(data + b"PK\x03\x04") == image_format
    assert read_header(data, accepted).height == NOISE.height

    with pytest.raises(ImageTooLarge, match=f"64 x 48 pixels; the limit is .* megapixels for {image_format}"):
        read_header(data, refused)


def test_brands_tell_heic_from_avif_and_heic_needs_pi_heif(monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\0\0\0\x1cftypmif1\0\0\0\0mif1heicmiaf" + bytes(50)
    assert identify(data) == identify(data.replace(b"ftypmif1", b"ftyphevc")) == "HEIC"
    assert identify(data.replace(b"mif1heic", b"mif1avif")) == identify(data.replace(b"ftypmif1", b"ftypavis")) == "AVIF"

    monkeypatch.setattr(apart, "HAS_HEIC", False)
    with pytest.raises(UnsupportedFormat, match=r"which pi-heif must be installed: pip install 'nereid-gateway\[heic\]'"):
        identify(data)


@pytest.mark.parametrize(("name", "options"), [*((name, {}) for name in FORMATS), ("JPEG", {"progressive": True})])
def test_every_format_tells_its_size(name: str, options: dict[str, object]) -> None:
    for size in ((1, 1), (5000, 17)) if name != "AVIF" else ((300, 200),):
        data = encode(Image.new("RGB", size, "teal"), name, **options) + FILL
        assert count_pixels(data, LIMITS) == size[0] * size[1]
    data = encode(Image.new("RGB", (30, 20)), name, **({"exif": FILL} if name == "JPEG" else {}))
    assert {count_pixels(data[:length], LIMITS) for length in range(0, 700, 7)} <= set(range(601))


def test_jpeg_tells_its_size_however_late_but_not_beyond_its_first_scan() -> None:
    """The search would take long there, and a scan without a frame header cannot be decoded. A HEIC tells that of its frame."""
    data = encode(Image.new("CMYK", (300, 200)), "JPEG")
    at = data.index(b"\xff\xc0")
    segments = b"".join(b"\xff\xed" + (60_002).to_bytes(2) + bytes(60_000) for _ in range(3))

    assert count_pixels(data[:2] + segments + data[2:], LIMITS) == 60_000
    assert count_pixels(data[:at] + b"\xff\xda\0\x08" + bytes(6) + data[at:] + FILL, LIMITS) == 0
    assert count_pixels(HEIC, LIMITS) == 64 * 64


def block(*entries: tuple[int, int, bytes], order: str = "<", at: int = 8) -> bytes:
    """Write a TIFF block with one directory of entries (tag, type, value), at this offset."""
    magic = b"II*\0" if order == "<" else b"MM\0*"
    directory = b"".join(struct.pack(order + "HHL", tag, kind, 1) + value.ljust(4, b"\0") for tag, kind, value in entries)
    return magic + struct.pack(order + "L", at) + bytes(at - 8) + struct.pack(order + "H", len(entries)) + directory + bytes(4)


@pytest.mark.parametrize(("order", "kind", "number"), [("<", 3, "H"), (">", 3, "H"), (">", 4, "L"), ("<", 6, "b"), ("<", 11, "f")])
def test_orientation_is_any_number_that_pillow_reads(order: str, kind: int, number: str) -> None:
    exif = Image.Exif()
    entry = 0x0112, kind, struct.pack(order + number, 6)
    exif.load(block(entry, order=order))

    assert exif[ExifTags.Base.Orientation] == 6
    other = ExifTags.Base.Make, 3, bytes(4)
    assert read_orientation(b"Exif\0\0" + block(other, entry, other, order=order, at=100)) == 6


@pytest.mark.parametrize(
    "exif",
    [b"XX*\0\x08\0\0\0\0\0", b"II*\0\x08\0\0\0\xff\xff", exif_of(9).tobytes(), block((0x0112, 7, b"\6"))],
)
def test_block_without_a_valid_orientation_is_upright(exif: bytes) -> None:
    assert read_orientation(exif) == 1


@pytest.mark.parametrize(("image_format", "mode"), [("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("WEBP", "RGB")])
def test_hostile_exif_block_costs_nothing(image_format: str, mode: str) -> None:
    """Each tag claims the whole block; Pillow would copy hundreds of megabytes."""
    data = encode(Image.new(mode, (32, 16)), image_format, exif=b"Exif\0\0" + hostile_tags())
    with peak_below(5_000_000):
        assert pixels_of(data).shape == (16, 32, 3)
