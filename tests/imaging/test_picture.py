"""Pictures: images with detections drawn on them, and thumbnails."""

import subprocess
import sys
from io import BytesIO
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.errors import InvalidImage
from app.imaging.drawing import Marks
from app.imaging.header import read_header
from app.imaging.picture import PictureType, draw_picture
from app.imaging.thumbnail import to_thumbnail
from tests.imaging.samples import FORMATS, MEGA, PIXELS, encode, limits

MARKS = Marks(np.array([[2, 3, 20, 14]], np.float32), np.array([0.5], np.float32), np.array([1], np.int32), ["red"])
NOTHING = Marks(MARKS.boxes[:0], MARKS.scores[:0], MARKS.class_ids[:0], [])


def draw(data: bytes, marks: Marks = NOTHING, picture_type: PictureType = "image/png") -> NDArray[np.uint8]:
    picture = draw_picture(read_header(data, limits(MEGA)), marks, picture_type)
    with Image.open(BytesIO(picture)) as image:
        assert Image.MIME[image.format or ""] == picture_type
        return np.asarray(image)


@pytest.mark.parametrize("image_format", FORMATS)
def test_image_of_any_format_keeps_its_colours(image_format: str) -> None:
    data = encode(Image.fromarray(PIXELS), image_format)

    assert np.abs(draw(data).astype(int) - PIXELS).max() <= (0 if image_format in {"PNG", "BMP", "WEBP"} else 12)
    assert np.abs(draw(data, picture_type="image/jpeg").astype(int) - PIXELS).mean() < 3


def profile_of(colours: bytes) -> bytes:
    """Make a profile that is only as good as its colour space."""
    return bytes(range(16)) + colours + bytes(108)


@pytest.mark.parametrize("picture_type", get_args(PictureType))
@pytest.mark.parametrize(
    ("mode", "profile", "stays"),
    [
        ("RGB", b"", False),
        ("RGB", profile_of(b"RGB ") * 999, True),
        ("CMYK", profile_of(b"CMYK"), False),
        ("L", profile_of(b"GRAY"), False),
    ],
    ids=["none", "RGB", "CMYK", "grey"],
)
def test_colour_profile_of_a_jpeg_stays_if_it_can_be_applied(
    picture_type: PictureType, mode: str, profile: bytes, *, stays: bool
) -> None:
    """The picture is RGB. Pillow here does not read profiles; one with its defaults does."""
    data = encode(Image.fromarray(PIXELS).convert(mode), "JPEG", icc_profile=profile)
    picture = draw_picture(read_header(data, limits(MEGA)), MARKS, picture_type)
    read = "import sys; from PIL import Image; sys.stdout.buffer.write(Image.open(sys.stdin.buffer).info.get('icc_profile') or b'')"
    done = subprocess.run([sys.executable, "-c", read], input=picture, capture_output=True, check=True)

    assert done.stdout == (profile if stays else b"")
    assert draw(data, MARKS, picture_type).shape == PIXELS.shape


def test_large_image_is_drawn_on_at_its_full_size_unless_it_is_truncated() -> None:
    data = encode(Image.effect_noise((4000, 200), 50).convert("RGB"), "JPEG")

    assert draw(data).shape == (200, 4000, 3)
    with pytest.raises(InvalidImage):
        draw(data[:100])


@pytest.mark.parametrize(
    ("box", "size"),
    [((0, 0, 1, 1), (200, 50)), ((0.5, 0, 0.75, 1), (100, 100)), ((1, 1, 1, 1), (1, 1)), ((0.6, 0.5, 0.6, 0.5), (1, 1))],
)
def test_thumbnail_is_a_part_shrunk_to_its_longer_side_but_never_enlarged(box: tuple[float, ...], size: tuple[int, int]) -> None:
    pixels = np.full((100, 400, 3), (0, 0, 255), np.uint8)
    pixels[:, :200] = (255, 0, 0)
    picture = Image.open(BytesIO(to_thumbnail(pixels, 200, box)))
    assert (picture.format, picture.size) == ("JPEG", size)
    red, _, blue = picture.getpixel((size[0] - 1, size[1] - 1))  # type: ignore[misc]  # of RGB
    assert (blue > 200, red < 50) == (True, True)
