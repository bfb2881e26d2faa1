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
    assert jpeg.read_size(data) is None


@pytest.mark.parametrize("data", [CAT[:20_000], CAT[:10_000] + bytes(500) + CAT[10_500:]])
def test_what_libjpeg_warns_of_is_not_decoded(data: bytes) -> None:
    """Never half a picture in grey: Pillow has the last word."""
    assert jpeg.decode(data, (451, 300), (451, 300), None) is None


def oriented() -> bytes:
    """An EXIF block, with its mark, of a picture to be turned."""
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif.tobytes()


def test_exif_is_found_behind_other_segments() -> None:
    """As it is in the file, without its mark."""
    data = saved("RGB", exif=oriented(), comment=b"before", dpi=(72, 72))

    assert jpeg.walk(data) == (oriented().removeprefix(b"Exif\0\0"), 1)
    assert jpeg.read_size(data) == (64, 48)


@pytest.mark.parametrize("between", [b"\xff" * 9, b"\xff\x01", b"\xff\xd0", b"junk", b"\xff\xe2\x00\x00", b"\xff\xe2\x00\x02"])
def test_exif_is_found_behind_what_decoders_skip(between: bytes) -> None:
    """Fill bytes, markers without a length or with none that makes sense, and junk."""
    plain = saved("RGB", exif=oriented())

    assert jpeg.walk(plain[:2] + between + plain[2:]).exif == oriented().removeprefix(b"Exif\0\0")


@pytest.mark.parametrize("cut", range(0, 700, 7))
def test_a_file_that_ends_early_has_told_what_it_has(cut: int) -> None:
    """Whether it can be decoded is for decoders to say."""
    assert jpeg.walk(saved("RGB", progressive=True)[: 3 + cut]).scans <= 10


SCAN = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00" + bytes(4)


def test_a_jpeg_of_countless_scans_is_refused() -> None:
    """Each of them would visit every pixel; an ordinary progressive JPEG passes."""
    plain = saved("RGB", progressive=True)

    assert 5 < jpeg.walk(plain).scans < 20
    with pytest.raises(BrokenPicture, match="too many"):
        jpeg.walk(plain[:-2] + SCAN * 200 + b"\xff\xd9")


def test_what_follows_the_picture_does_not_matter() -> None:
    """No decoder goes beyond the end, or beyond a scan that holds everything; phones append videos."""
    anything = np.random.default_rng(0).bytes(1_000_000) + SCAN * 200

    assert jpeg.walk(saved("RGB", progressive=True) + anything) == jpeg.walk(saved("RGB", progressive=True))
    assert jpeg.walk(saved("RGB")[:-2] + anything).scans == 1


@pytest.mark.parametrize("blind", [b"\xff\xd0", b"\xff\x01", b"\xff\xd8", b"\xff\xff"])
def test_scans_cannot_hide_behind_what_decoders_read_otherwise(blind: bytes) -> None:
    """A marker that has no length is not skipped by the bytes that follow it."""
    many = saved("RGB", progressive=True)[2:-2] + SCAN * 200
    hidden = blind + (len(many) + 2).to_bytes(2, "big") + many
    with pytest.raises(BrokenPicture, match="too many"):
        jpeg.walk(b"\xff\xd8" + hidden + saved("RGB")[2:])


@pytest.mark.parametrize(
    ("flood", "some", "many"),
    [
        (b"\xff", 1000, 300_000),
        (b"\x01", 1000, 300_000),
        (b"\xff\xe5\x00\x02", 1000, 3000),
        (b"\xff\xd0", 1000, 3000),
        (b"\xff\xd0" + b"\xff\xe5\x00\x02", 500, 1500),
    ],
    ids=["fill bytes", "junk", "segments", "markers", "both"],
)
def test_a_jpeg_that_is_mostly_header_is_refused(flood: bytes, some: int, many: int) -> None:
    """Some hundred segments are what a camera may write, with maps and colour profiles."""
    plain = saved("RGB", exif=oriented())

    assert jpeg.walk(plain[:2] + flood * some + plain[2:]).exif
    for rest in (plain[2:], b""):
        with pytest.raises(BrokenPicture, match="too many"):
            jpeg.walk(plain[:2] + flood * many + rest)
