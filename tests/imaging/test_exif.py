"""EXIF orientation: reading it from any block, and turning pixels upright."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image

from app.imaging.decode import decode
from app.imaging.exif import read_orientation
from app.imaging.header import read_header
from tests.imaging.samples import MEGA, encode, exif_of, hostile_tags, limits, peak_below


def block(order: str, *entries: tuple[int, int, int], at: int = 8) -> bytes:
    """Write a TIFF block with one directory of entries (tag, type, value), at this offset."""
    magic = b"II*\0" if order == "<" else b"MM\0*"
    directory = b"".join(struct.pack(order + "HHLHxx", tag, kind, 1, value) for tag, kind, value in entries)
    return magic + struct.pack(order + "L", at) + bytes(at - 8) + struct.pack(order + "H", len(entries)) + directory


MALFORMED = [
    b"Exif\0\0",
    b"Exif\0\0garbage",
    b"Exif\0\0II*\0",
    b"Exif\0\0II*\0\xff\xff\xff\xff",
    b"Exif\0\0II*\0\x08\0\0\0\xff\xff",
    b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\xff\xff\xff\xff\xff\xff\xff\xff",
    b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x02\0\x02\0\0\0\x36\0\0\0\0\0\0\0",
    exif_of(0).tobytes(),
    exif_of(9).tobytes(),
    exif_of(65535).tobytes(),
]


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("prefix", [b"", b"Exif\0\0"])
@pytest.mark.parametrize("order", ["<", ">"])
def test_orientation_is_read(order: str, prefix: bytes, orientation: int) -> None:
    other = (ExifTags.Base.Make, 3, 5)

    assert read_orientation(prefix + block(order, (0x0112, 3, orientation))) == orientation
    assert read_orientation(prefix + block(order, other, (0x0112, 3, orientation), other, at=100)) == orientation


@pytest.mark.parametrize(("kind", "number"), [(3, "H2x"), (4, "L"), (6, "b3x"), (8, "h2x"), (9, "l"), (11, "f"), (13, "L")])
@pytest.mark.parametrize("order", ["<", ">"])
def test_orientation_may_be_any_number_that_pillow_reads(order: str, kind: int, number: str) -> None:
    """Some programs store the orientation as LONG."""
    entry = struct.pack(order + "HHHL" + number, 1, 0x0112, kind, 1, 6)
    data = {"<": b"II*\0", ">": b"MM\0*"}[order] + struct.pack(order + "L", 8) + entry + bytes(4)
    exif = Image.Exif()
    exif.load(data)

    assert read_orientation(data) == exif[ExifTags.Base.Orientation] == 6


@pytest.mark.parametrize(
    "exif",
    [*MALFORMED, b"", b"II", b"XX*\0\x08\0\0\0\0\0", block("<"), block("<", (0x0112, 7, 6)), block("<", (0x0113, 3, 6))],
)
def test_block_without_a_valid_orientation_is_upright(exif: bytes) -> None:
    assert read_orientation(exif) == 1


@given(st.sampled_from([b"", b"II*\0", b"MM\0*"]), st.binary(max_size=60))
def test_any_block_has_an_orientation(start: bytes, rest: bytes) -> None:
    assert read_orientation(start + rest) in range(1, 9)


@pytest.mark.parametrize("mode", ["RGB", "CMYK"])
@pytest.mark.parametrize("image_format", ["JPEG", "PNG", "WEBP"])
def test_hostile_exif_block_costs_nothing(image_format: str, mode: str) -> None:
    """Each tag claims the whole block; Pillow would copy hundreds of megabytes."""
    image = Image.new(mode if image_format == "JPEG" else "RGB", (32, 16))
    data = encode(image, image_format, exif=b"Exif\0\0" + hostile_tags())
    with peak_below(5_000_000):
        header = read_header(data, limits(MEGA))
        decode(header, (32, 16))

    assert header.orientation == 1
