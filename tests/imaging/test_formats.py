"""Formats are recognised by their first bytes, and files that are built to keep a decoder busy are refused."""

import pytest
from PIL import Image

from app.errors import InvalidImage, UnsupportedFormat
from app.imaging.formats import identify
from tests.imaging.samples import FORMATS, encode, png_chunk

RED = Image.new("RGB", (64, 64), "red")


@pytest.mark.parametrize("image_format", FORMATS)
def test_format_is_recognised_by_the_first_bytes(image_format: str) -> None:
    """What follows does not matter: a file that is two formats at once is what it starts as."""
    assert identify(encode(RED, image_format)) == image_format
    assert identify(encode(RED, image_format) + b"PK\x03\x04") == image_format


@pytest.mark.parametrize("data", [b"", b"\xff", b"GIF", b"RIFF1234WAVE", b"%PDF-1.7", b"<svg/>"])
def test_other_data_is_refused(data: bytes) -> None:
    with pytest.raises(UnsupportedFormat, match="JPEG, PNG, WEBP, GIF, BMP, AVIF, TIFF"):
        identify(data)


@pytest.mark.parametrize("brand", [b"heic", b"heix", b"mif1", b"hevc"])
def test_a_heic_is_told(brand: bytes) -> None:
    """Phones write HEIC, but can write JPEG as well."""
    with pytest.raises(UnsupportedFormat, match=r'a HEIC; convert it to JPEG, or let the phone take JPEGs: .* "Most Compatible"'):
        identify(b"\0\0\0\x1cftyp" + brand + b"\0\0\0\0mif1heicmiaf" + bytes(50))


@pytest.mark.parametrize("data", [b"\0\0\0\x0cjP  \r\n\x87\n", b"\0\0\0\x0cJXL \r\n\x87\n", b"\xff\x4f\xff\x51", b"\xff\x0a"])
def test_other_kinds_of_jpeg_are_told(data: bytes) -> None:
    with pytest.raises(UnsupportedFormat, match="JPEG 2000 or JPEG XL"):
        identify(data + bytes(50))


@pytest.mark.parametrize("brands", [b"avif\0\0\0\0", b"mif1\0\0\0\0mif1avif", b"avis\0\0\0\0"])
def test_an_avif_is_recognised_by_any_of_its_brands(brands: bytes) -> None:
    """The first brand may be the one of all HEIF files."""
    assert identify(b"\0\0\0\x1cftyp" + brands + bytes(50)) == "AVIF"


def add_comments(gif: bytes, blocks: int) -> bytes:
    """Insert a comment of so many blocks of 255 bytes before the first frame of a GIF."""
    start = gif.index(b",\0\0\0\0")
    return gif[:start] + b"!\xfe" + (b"\xff" + b"x" * 255) * blocks + b"\0" + gif[start:]


@pytest.mark.parametrize("blocks", [0, 10, 4000])
def test_gif_with_a_comment_is_accepted(blocks: int) -> None:
    """The limit is 1 MiB of comments before the first frame."""
    assert identify(add_comments(encode(RED, "GIF"), blocks)) == "GIF"


@pytest.mark.parametrize("blocks", [5000, 50_000])
def test_gif_with_endless_comments_is_refused(blocks: int) -> None:
    """Pillow would join the comments before the first frame in quadratic time."""
    with pytest.raises(InvalidImage, match="first frame"):
        identify(add_comments(encode(RED, "GIF"), blocks))


@pytest.mark.parametrize(("block", "some", "many"), [(b"!\xfe\x01x\0", 2000, 10_000), (b"!\x01\0", 5000, 20_000)])
def test_gif_with_many_small_extensions_is_refused(block: bytes, some: int, many: int) -> None:
    """Each extension costs Pillow some time, however small it is."""
    plain = encode(RED, "GIF")
    start = plain.index(b",\0\0\0\0")

    assert identify(plain[:start] + block * some + plain[start:]) == "GIF"
    with pytest.raises(InvalidImage, match="first frame"):
        identify(plain[:start] + block * many + plain[start:])


def test_gif_with_a_comment_in_small_blocks_is_refused() -> None:
    """The time to join them grows with their number and their bytes."""
    plain = encode(RED, "GIF")
    start = plain.index(b",\0\0\0\0")

    with pytest.raises(InvalidImage, match="first frame"):
        identify(plain[:start] + b"!\xfe" + b"\x01x" * 100_000 + b"\0" + plain[start:])


@pytest.mark.parametrize("cut", [6, 10, 12, 13, 20])
def test_truncated_gif_is_left_to_the_decoder(cut: int) -> None:
    """A GIF whose blocks cannot be walked to the end is still a GIF."""
    assert identify(encode(RED, "GIF")[:cut]) == "GIF"


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
    """Pillow reads chunks one by one, so only a plausible number is accepted, wherever they are in the file."""
    plain = encode(RED, "PNG")
    for at in (33, plain.index(b"IDAT") - 4, plain.index(b"IEND") - 4):
        assert identify(plain[:at] + chunk * some + plain[at:]) == "PNG"
        with pytest.raises(InvalidImage, match="chunks"):
            identify(plain[:at] + chunk * many + plain[at:])


def test_chunks_behind_the_end_of_a_png_do_not_count() -> None:
    """No decoder reads what follows the last chunk."""
    assert identify(encode(RED, "PNG") + png_chunk(b"tEXt", b"a\0b") * 200) == "PNG"


@pytest.mark.parametrize("chunk", [b"abcd\0\0\0\0", b"ANMF\x03\0\0\0abc\0"], ids=["empty", "odd"])
def test_webp_with_too_many_chunks_is_refused(chunk: bytes) -> None:
    """A record is kept of each, so only a plausible number is accepted."""
    plain = encode(RED, "WEBP")

    assert identify(plain + chunk * 15_000) == "WEBP"
    with pytest.raises(InvalidImage, match="chunks"):
        identify(plain + chunk * 30_000)


@pytest.mark.parametrize("cut", range(12, 60))
def test_truncated_webp_is_left_to_the_decoder(cut: int) -> None:
    """A WebP whose chunks cannot be walked to the end is still a WebP."""
    assert identify(encode(RED, "WEBP")[:cut]) == "WEBP"


@pytest.mark.parametrize("cut", range(8, 60))
def test_truncated_png_is_left_to_the_decoder(cut: int) -> None:
    """A PNG whose chunks cannot be walked to the end is still a PNG."""
    assert identify(encode(RED, "PNG")[:cut]) == "PNG"
