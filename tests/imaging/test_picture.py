"""Pictures: images with detections drawn on them."""

import subprocess
import sys
from io import BytesIO
from typing import get_args

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.errors import ImageTooLarge, InvalidImage, UnsupportedFormat
from app.imaging.drawing import Marks, colour_of
from app.imaging.header import read_header
from app.imaging.picture import PictureType, draw_picture
from tests.imaging.samples import FORMATS, MEGA, PIXELS, encode, exif_of, limits, store

NOTHING = Marks(np.empty((0, 4), np.float32), np.empty(0, np.float32), np.empty(0, np.int32), [])
ONE = Marks(np.array([[2, 3, 20, 14]], np.float32), np.array([0.5], np.float32), np.array([1], np.int32), ["red"])


def profile_of(colours: bytes) -> bytes:
    """Make a profile that is only as good as its colour space."""
    return bytes(range(16)) + colours + bytes(108)


def draw(data: bytes, marks: Marks = NOTHING, picture_type: PictureType = "image/png") -> NDArray[np.uint8]:
    picture = draw_picture(read_header(data, limits(MEGA)), marks, picture_type)
    with Image.open(BytesIO(picture)) as image:
        assert Image.MIME[image.format or ""] == picture_type
        return np.asarray(image)


@pytest.mark.parametrize("image_format", FORMATS)
def test_an_image_of_any_format_keeps_its_colours(image_format: str) -> None:
    data = encode(Image.fromarray(PIXELS), image_format)

    assert np.abs(draw(data).astype(int) - PIXELS).max() <= (0 if image_format in {"PNG", "BMP", "WEBP"} else 12)
    assert np.abs(draw(data, picture_type="image/jpeg").astype(int) - PIXELS).mean() < 3


@pytest.mark.parametrize("orientation", range(1, 9))
def test_the_picture_is_upright(orientation: int) -> None:
    """Boxes refer to the upright image."""
    data = encode(Image.fromarray(store(PIXELS, orientation)), "PNG", exif=exif_of(orientation))

    assert (draw(data)[..., :3] == PIXELS).all()
    assert (draw(data, ONE)[3:14, 2] == colour_of(1)).all()


@pytest.mark.parametrize("picture_type", get_args(PictureType))
@pytest.mark.parametrize("profile", [b"", profile_of(b"RGB "), profile_of(b"RGB ") * 999], ids=len)
def test_the_colour_profile_of_a_jpeg_stays(picture_type: PictureType, profile: bytes) -> None:
    """Pillow here does not read profiles; one with its defaults does."""
    data = encode(Image.fromarray(PIXELS), "JPEG", icc_profile=profile)
    picture = draw_picture(read_header(data, limits(MEGA)), ONE, picture_type)
    read = "import sys; from PIL import Image; sys.stdout.buffer.write(Image.open(sys.stdin.buffer).info.get('icc_profile') or b'')"
    done = subprocess.run([sys.executable, "-c", read], input=picture, capture_output=True, check=True)

    assert done.stdout == profile
    assert draw(data, ONE, picture_type).shape == PIXELS.shape


@pytest.mark.parametrize(("mode", "space"), [("CMYK", b"CMYK"), ("L", b"GRAY")])
def test_the_profile_of_other_colours_does_not_stay(mode: str, space: bytes) -> None:
    """The picture is RGB, to which it cannot be applied."""
    data = encode(Image.new(mode, (32, 16)), "JPEG", icc_profile=profile_of(space))

    assert b"ICC_PROFILE" not in draw_picture(read_header(data, limits(MEGA)), ONE, "image/jpeg")
    assert b"iCCP" not in draw_picture(read_header(data, limits(MEGA)), ONE, "image/png")


def test_a_large_image_is_drawn_on_at_its_full_size() -> None:
    image = Image.effect_noise((4000, 200), 50).convert("RGB")

    assert draw(encode(image, "JPEG")).shape == (200, 4000, 3)


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"not an image", UnsupportedFormat),
        (encode(Image.fromarray(PIXELS), "JPEG")[:-100], InvalidImage),
        (encode(Image.new("RGB", (1001, 1000)), "PNG"), ImageTooLarge),
    ],
)
def test_an_image_that_is_no_good_is_an_error(data: bytes, error: type[Exception]) -> None:
    with pytest.raises(error):
        draw(data)
