"""libjpeg-turbo for the common case; everything else is left to Pillow."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from app import jpeg
from app.errors import BrokenPicture
from tests.conftest import picture

CAT = picture("chelsea.jpg")


def saved(mode: str, size: tuple[int, int] = (64, 48), **options: Any) -> bytes:  # noqa: ANN401
    file = BytesIO()
    Image.new(mode, size).save(file, "JPEG", **options)
    return file.getvalue()


def test_pixels_are_those_of_pillow() -> None:
    """Two programs, one library: not a bit differs."""
    pixels = jpeg.decode(CAT, (451, 300), (451, 300), None)

    assert pixels is not None
    np.testing.assert_array_equal(pixels, np.asarray(Image.open(BytesIO(CAT))))


def test_grey_comes_out_as_rgb() -> None:
    """Three equal planes."""
    pixels = jpeg.decode(saved("L"), (64, 48), (64, 48), None)

    assert pixels is not None
    assert pixels.shape == (48, 64, 3)


def test_the_slot_is_written_to_where_it_fits() -> None:
    """No copy is made when rows lie one behind the other and the size is right."""
    frame = np.zeros((640, 451, 3), np.uint8)
    into = frame[100:400]

    assert jpeg.decode(CAT, (451, 300), (451, 300), into) is into
    assert frame[100:400].any()
    assert not frame[:100].any()
    assert not frame[400:].any()


@pytest.mark.parametrize("into", [np.zeros((300, 500, 3), np.uint8)[:, :451], np.zeros((299, 451, 3), np.uint8)])
def test_the_slot_is_left_alone_where_it_does_not_fit(into: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
    """Rows with gaps between them, or another size, get a copy later."""
    pixels = jpeg.decode(CAT, (451, 300), (451, 300), into)

    assert pixels is not None
    assert pixels.shape == (300, 451, 3)
    assert not into.any()


@pytest.mark.parametrize("data", [saved("CMYK"), b"\xff\xd8\xff", CAT[:100]])
def test_what_is_not_common_is_no_header(data: bytes) -> None:
    """Pillow is asked instead."""
    assert jpeg.read_header(data) is None


@pytest.mark.parametrize("data", [CAT[:20_000], CAT[:10_000] + bytes(500) + CAT[10_500:]])
def test_what_libjpeg_warns_of_is_not_decoded(data: bytes) -> None:
    """Never half a picture in grey: Pillow has the last word."""
    assert jpeg.decode(data, (451, 300), (451, 300), None) is None


def test_exif_is_found_behind_other_segments() -> None:
    """As Pillow finds it, without its mark."""
    exif = Image.Exif()
    exif[0x0112] = 6
    header = jpeg.read_header(saved("RGB", exif=exif, comment=b"before", dpi=(72, 72)))

    assert header is not None
    assert (header.width, header.height) == (64, 48)
    assert header.exif == exif.tobytes().removeprefix(b"Exif\0\0")


def test_a_segment_that_claims_no_length_ends_the_search() -> None:
    """A length below its own two bytes is nonsense; nothing loops on it."""
    plain = saved("RGB")
    header = jpeg.read_header(plain[:2] + b"\xff\xe2\x00\x00" + plain[2:])

    assert header is None or header.exif == b""


SCAN = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + bytes(4)


def test_a_jpeg_of_countless_scans_is_refused() -> None:
    """Each of them would visit every pixel; an ordinary progressive JPEG passes."""
    plain = saved("RGB", progressive=True)

    assert jpeg.read_header(plain)
    with pytest.raises(BrokenPicture, match="scans"):
        jpeg.read_header(plain[:-2] + SCAN * 200 + b"\xff\xd9")


def test_scans_behind_one_that_holds_everything_do_not_matter() -> None:
    """No decoder goes there; the bytes may as well be those of another file."""
    assert jpeg.read_header(saved("RGB") + SCAN * 200)


@pytest.mark.parametrize("blind", [b"\xff\xd0", b"\xff\x01", b"\xff\xd8", b"\xff\xff"])
def test_scans_cannot_hide_behind_what_decoders_read_otherwise(blind: bytes) -> None:
    """A marker that has no length is not skipped by the bytes that follow it."""
    many = saved("RGB", progressive=True)[2:-2] + SCAN * 200
    hidden = blind + (len(many) + 2).to_bytes(2, "big") + many
    with pytest.raises(BrokenPicture, match="scans"):
        jpeg.read_header(b"\xff\xd8" + hidden + saved("RGB")[2:])


def test_a_jpeg_of_fill_bytes_is_refused() -> None:
    """Some are legal, megabytes of them serve nobody."""
    plain = saved("RGB")

    assert jpeg.read_header(plain[:2] + b"\xff" * 1000 + plain[2:])
    with pytest.raises(BrokenPicture, match="fill"):
        jpeg.read_header(plain[:2] + b"\xff" * 300_000 + plain[2:])


def test_a_jpeg_of_countless_segments_is_refused() -> None:
    """Some hundreds are what a camera may write, with maps and colour profiles."""
    plain = saved("RGB")
    empty = b"\xff\xe5\x00\x02"

    assert jpeg.read_header(plain[:2] + empty * 1000 + plain[2:])
    with pytest.raises(BrokenPicture, match="segments"):
        jpeg.read_header(plain[:2] + empty * 3000 + plain[2:])
