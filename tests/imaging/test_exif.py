"""EXIF orientation, read from any block."""

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import ExifTags, Image

from app.imaging.decode import decode
from app.imaging.exif import read_orientation
from app.imaging.header import read_header
from tests.imaging.samples import MEGA, encode, exif_of, hostile_tags, limits, peak_below


def block(*entries: tuple[int, int, bytes], order: str = "<", at: int = 8) -> bytes:
    """Write a TIFF block with one directory of entries (tag, type, value), at this offset."""
    magic = b"II*\0" if order == "<" else b"MM\0*"
    directory = b"".join(struct.pack(order + "HHL", tag, kind, 1) + value.ljust(4, b"\0") for tag, kind, value in entries)
    return magic + struct.pack(order + "L", at) + bytes(at - 8) + struct.pack(order + "H", len(entries)) + directory + bytes(4)


@pytest.mark.parametrize(
    ("order", "kind", "number"),
    [("<", 3, "H"), (">", 3, "H"), (">", 4, "L"), ("<", 6, "b"), (">", 8, "h"), ("<", 9, "l"), ("<", 11, "f")],
)
def test_orientation_is_any_number_that_pillow_reads(order: str, kind: int, number: str) -> None:
    exif = Image.Exif()
    entry = 0x0112, kind, struct.pack(order + number, 6)
    exif.load(block(entry, order=order))

    assert exif[ExifTags.Base.Orientation] == 6
    other = ExifTags.Base.Make, 3, bytes(4)
    assert read_orientation(b"Exif\0\0" + block(other, entry, other, order=order, at=100)) == 6


@pytest.mark.parametrize(
    "exif",
    [
        b"XX*\0\x08\0\0\0\0\0",
        b"II*\0\xff\xff\xff\xff",
        b"II*\0\x08\0\0\0\xff\xff",
        exif_of(0).tobytes(),
        exif_of(9).tobytes(),
        block((0x0112, 7, b"\6")),
    ],
)
def test_block_without_a_valid_orientation_is_upright(exif: bytes) -> None:
    assert read_orientation(exif) == 1


@given(st.sampled_from([b"", b"II*\0", b"MM\0*"]), st.binary(max_size=60))
def test_any_block_has_an_orientation(start: bytes, rest: bytes) -> None:
    assert read_orientation(start + rest) in range(1, 9)


@pytest.mark.parametrize(("image_format", "mode"), [("JPEG", "RGB"), ("JPEG", "CMYK"), ("PNG", "RGB"), ("WEBP", "RGB")])
def test_hostile_exif_block_costs_nothing(image_format: str, mode: str) -> None:
    """Each tag claims the whole block; Pillow would copy hundreds of megabytes."""
    data = encode(Image.new(mode, (32, 16)), image_format, exif=b"Exif\0\0" + hostile_tags())
    with peak_below(5_000_000):
        header = read_header(data, limits(MEGA))
        decode(header, (32, 16))

    assert header.orientation == 1
