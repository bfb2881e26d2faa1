"""JPEG by libjpeg-turbo: unusual files are left to Pillow, malicious ones are rejected."""

from io import BytesIO
from typing import Any

import numpy as np
import pytest
from PIL import Image

from app.errors import InvalidImage, UnsupportedFormat
from app.imaging import jpeg
from app.imaging.decode import decode
from app.imaging.header import read_header
from tests.imaging.samples import exif_of, limits
from tests.support import sample_image

CAT = sample_image("chelsea.jpg")
EXIF = exif_of(6).tobytes()


def saved(image: Image.Image, **options: Any) -> bytes:  # noqa: ANN401
    file = BytesIO()
    image.save(file, "JPEG", **options)
    return file.getvalue()


BLANK, CAT_IMAGE = Image.new("RGB", (64, 48)), Image.open(BytesIO(CAT))
BASELINE, PROGRESSIVE, WITH_EXIF = saved(BLANK), saved(BLANK, progressive=True), saved(BLANK, exif=EXIF)
FRAME = b"\xff\xc0\x00\x11\x08"
SCANS = b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00\0\0\0\0" * 200


def test_pixels_are_those_of_pillow() -> None:
    """Pillow uses the same library, so the results are equal."""
    pixels = jpeg.decode(CAT, (451, 300), (451, 300), None)

    assert pixels is not None
    np.testing.assert_array_equal(pixels, np.asarray(CAT_IMAGE))


@pytest.mark.parametrize(
    ("marker", "depth", "kind"),
    [(0xC1, 12, "12-bit"), (0xC3, 16, "lossless"), (0xC5, 8, "hierarchical"), (0xF7, 8, "JPEG-LS")],
)
def test_kind_that_cannot_be_decoded_is_told(marker: int, depth: int, kind: str) -> None:
    with pytest.raises(UnsupportedFormat, match=f"^the image is a {kind} JPEG; send a baseline or progressive one of 8 bits"):
        jpeg.read_header(BASELINE.replace(FRAME, bytes((0xFF, marker, 0, 0x11, depth))))


@pytest.mark.parametrize("whole", [CAT, saved(CAT_IMAGE, progressive=True)])
def test_marker_of_the_end_may_be_missing(whole: bytes) -> None:
    pixels, data = (decode(read_header(data, limits(10**7)), (451, 300)) for data in (whole, whole[:-2]))
    assert np.array_equal(data, pixels)


@pytest.mark.parametrize("between", [b"\xff" * 9, b"\xff\xd0", b"junk", b"\xff\xe2\0\0", b"\xff\xfe\0\x06text"])
def test_exif_is_found_behind_what_decoders_skip(between: bytes) -> None:
    """Other segments, fill bytes, markers without a length or with an invalid one, and junk are skipped as in libjpeg."""
    data = WITH_EXIF[:2] + between + WITH_EXIF[2:]

    assert jpeg.read_header(data) == (EXIF.removeprefix(b"Exif\0\0"), 1, True, (64, 48))


def test_file_of_one_scan_is_told_from_those_of_several_whatever_is_behind_the_image() -> None:
    """With several scans, libjpeg keeps all coefficients, even if the file is truncated after the first scan."""
    first, anything = PROGRESSIVE.index(b"\xff\xda"), np.random.default_rng(0).bytes(1_000_000) + SCANS

    assert jpeg.read_header(BASELINE)[1:] == (1, True, (64, 48))
    assert jpeg.read_header(PROGRESSIVE[: first + 30])[1:3] == (1, False)
    assert jpeg.read_header(PROGRESSIVE + anything) == jpeg.read_header(PROGRESSIVE)
    assert jpeg.read_header(BASELINE[:-2] + anything).scans == 1


MARKER, SEGMENT = b"\xff\xd0", b"\xff\xe5\x00\x02"


@pytest.mark.parametrize(
    ("flood", "some", "many"),
    [(b"\x01", 1000, 300_000), (SEGMENT, 1000, 3000), (MARKER, 1000, 3000)],
    ids=["junk", "segments", "markers"],
)
def test_jpeg_that_is_mostly_header_is_refused(flood: bytes, some: int, many: int) -> None:
    assert jpeg.read_header(WITH_EXIF[:2] + flood * some + WITH_EXIF[2:]).exif
    for rest in (WITH_EXIF[2:], b""):
        with pytest.raises(InvalidImage, match="too many"):
            jpeg.read_header(WITH_EXIF[:2] + flood * many + rest)


def test_too_many_scans_are_refused_also_behind_a_marker_without_a_length() -> None:
    """Each scan visits every pixel; the scans of a usual progressive JPEG are accepted."""
    assert 5 < jpeg.read_header(PROGRESSIVE).scans < 20
    scans = PROGRESSIVE[2:-2] + SCANS
    length = (len(scans) + 2).to_bytes(2)
    for hidden in (scans, *(marker + length + scans for marker in (b"\xff\xd0", b"\xff\xd8", b"\xff\xff"))):
        with pytest.raises(InvalidImage, match="too many"):
            jpeg.read_header(b"\xff\xd8" + hidden + BASELINE[2:])
