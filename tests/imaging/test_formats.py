"""Files are told apart by their first bytes, and those built to keep a decoder busy are refused."""

from io import BytesIO
from zlib import crc32

import pytest
from PIL import Image

from app.errors import BrokenPicture, UnsupportedFormat
from app.sniff import picture_format


def saved(form: str, **options: bool) -> bytes:
    file = BytesIO()
    Image.new("RGB", (64, 64), "red").save(file, form, **options)
    return file.getvalue()


@pytest.mark.parametrize("form", ["JPEG", "PNG", "WEBP", "GIF", "BMP"])
def test_each_format_is_known_by_its_first_bytes(form: str) -> None:
    """What follows does not matter: a polyglot is what it starts as."""
    assert picture_format(saved(form)) == form
    assert picture_format(saved(form) + b"PK\x03\x04") == form


@pytest.mark.parametrize("data", [b"", b"\xff", b"GIF", b"RIFF1234WAVE", b"%PDF-1.7", b"II*\0", b"<svg/>"])
def test_anything_else_is_refused(data: bytes) -> None:
    """The formats that are read are named."""
    with pytest.raises(UnsupportedFormat, match="JPEG, PNG, WEBP, GIF, BMP"):
        picture_format(data)


@pytest.mark.parametrize(("blocks", "is_refused"), [(10, False), (5000, True)])
def test_a_gif_of_endless_comments_is_refused(blocks: int, is_refused: bool) -> None:  # noqa: FBT001
    """A comment before the first frame is read whole; a short one is fine."""
    plain = saved("GIF")
    start = plain.index(b",\0\0\0\0")
    commented = plain[:start] + b"!\xfe" + (b"\xff" + b"x" * 255) * blocks + b"\0" + plain[start:]

    if is_refused:
        with pytest.raises(BrokenPicture, match="first frame"):
            picture_format(commented)
    else:
        assert picture_format(commented) == "GIF"


@pytest.mark.parametrize("cut", [6, 10, 12, 13, 20])
def test_a_gif_that_ends_early_is_left_to_the_decoder(cut: int) -> None:
    """Its header cannot be walked, and need not be."""
    assert picture_format(saved("GIF")[:cut]) == "GIF"


def chunk(kind: bytes, content: bytes = b"") -> bytes:
    """One chunk of a PNG."""
    return len(content).to_bytes(4, "big") + kind + content + crc32(kind + content).to_bytes(4, "big")


@pytest.mark.parametrize(
    ("flood", "some", "many"),
    [(chunk(b"tEXt", b"a\0b"), 50, 200), (chunk(b"IDAT"), 15_000, 30_000), (chunk(b"fdAT", bytes(8)), 15_000, 30_000)],
    ids=["text", "pixels", "animation"],
)
def test_a_png_of_countless_chunks_is_refused(flood: bytes, some: int, many: int) -> None:
    """Pillow reads them one by one, wherever they stand."""
    plain = saved("PNG")
    for at in (33, plain.index(b"IDAT") - 4, plain.index(b"IEND") - 4):
        assert picture_format(plain[:at] + flood * some + plain[at:]) == "PNG"
        with pytest.raises(BrokenPicture, match="chunks"):
            picture_format(plain[:at] + flood * many + plain[at:])


@pytest.mark.parametrize("cut", range(8, 60))
def test_a_png_that_ends_early_is_left_to_the_decoder(cut: int) -> None:
    """As a GIF is."""
    assert picture_format(saved("PNG")[:cut]) == "PNG"
