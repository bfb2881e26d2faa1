"""Filling the whole canvas: the middle of an image, or all of it, stretched; and the boxes' way back."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from PIL import Image

from app.imaging import jpeg
from app.imaging.fill import CenterCrop, Stretch
from app.imaging.resize import Interpolation
from app.imaging.transform import Crop, ImageTransform

SIDES = st.integers(1, 3000)


def gradient(width: int, height: int) -> NDArray[np.uint8]:
    """Make an image whose red tells the column and whose green tells the row, as fractions of 250."""
    pixels = np.zeros((height, width, 3), np.uint8)
    pixels[:, :, 0] = np.linspace(0, 250, width)
    pixels[:, :, 1] = np.linspace(0, 250, height)[:, None]
    return pixels


@pytest.mark.parametrize(
    ("image", "fraction", "crop"),
    [
        ((256, 256), 0.875, (16, 16, 224, 224)),
        ((640, 480), 0.875, (110, 30, 420, 420)),
        ((480, 640), 0.875, (30, 110, 420, 420)),
        ((500, 375), 1.0, (63, 0, 375, 375)),
        ((375, 500), 1.0, (0, 63, 375, 375)),
        ((100, 50), 0.5, (38, 13, 25, 25)),
        ((1, 1), 0.1, (0, 0, 1, 1)),
    ],
)
def test_the_middle_of_the_shorter_side_is_kept(image: tuple[int, int], fraction: float, crop: tuple[int, int, int, int]) -> None:
    assert CenterCrop((224, 224), fraction, "bilinear").fit(*image) == ImageTransform(0, 0, 224, 224, *image, Crop(*crop))


def test_the_crop_has_the_aspect_ratio_of_the_canvas() -> None:
    assert CenterCrop((200, 100), 1.0, "bilinear").fit(300, 300).crop == Crop(0, 75, 300, 150)


@given(st.tuples(SIDES, SIDES), st.floats(0.05, 1))
def test_a_crop_lies_inside_the_image(image: tuple[int, int], fraction: float) -> None:
    crop = CenterCrop((224, 160), fraction, "bilinear").fit(*image).crop

    assert crop is not None
    for start, length, whole in ((crop.left, crop.width, image[0]), (crop.top, crop.height, image[1])):
        assert 0 <= start < start + length <= whole
        assert abs(start - (whole - start - length)) <= 1


def test_the_middle_is_drawn() -> None:
    """Of an image of the true size, and of one that was decoded at half of it."""
    fit = CenterCrop((100, 100), 0.5, "bilinear")
    transform = fit.fit(800, 400)
    for width, height in ((800, 400), (400, 200)):
        canvas = np.empty((100, 100, 3), np.uint8)
        fit.draw(gradient(width, height), transform, canvas)

        left, right = (250 * (300 + 2 * at) / 800 for at in (0.5, 99.5))
        np.testing.assert_allclose(canvas[50, [0, -1], 0], [left, right], atol=1.5)
        np.testing.assert_allclose(canvas[[0, -1], 50, 1], [250 / 4, 250 * 3 / 4], atol=1.5)


@pytest.mark.parametrize("interpolation", ["bilinear", "bicubic"])
@pytest.mark.parametrize("size", [(640, 480), (500, 375), (3000, 61), (61, 3000), (100, 90), (30, 7)])
def test_the_middle_is_that_of_the_whole_image_when_it_has_been_resized(
    size: tuple[int, int], interpolation: Interpolation
) -> None:
    """As torchvision does it, which takes much memory for a long image; also where the image is enlarged."""
    pixels = np.random.default_rng(3).integers(0, 256, (*size[::-1], 3), np.uint8)
    fit = CenterCrop((112, 112), 0.875, interpolation)
    canvas = np.empty((112, 112, 3), np.uint8)
    fit.draw(pixels, fit.fit(*size), canvas)

    width, height = (side * 128 // min(size) for side in size)
    whole = Image.fromarray(pixels).resize((width, height), Image.Resampling[interpolation.upper()])
    left, top = round((width - 112) / 2), round((height - 112) / 2)
    expected = np.asarray(whole.crop((left, top, left + 112, top + 112)))
    assert np.abs(canvas.astype(int) - expected).max() <= 1


def test_pixels_far_from_the_crop_take_no_memory() -> None:
    """Pillow copies what it resizes, four bytes a pixel: the crop of 128 x 128 pixels and the filter's margin around it."""
    fit = CenterCrop((32, 32), 1.0, "bicubic")
    most = 4 * (128 + 2 * 10) * (128 + 2 * 10 + 32)

    assert 4 * 128 * 128 < fit.draw_bytes((128, 128), fit.fit(128, 128)) < fit.draw_bytes((12800, 128), fit.fit(12800, 128)) < most
    assert Stretch((32, 32), "bicubic").draw_bytes((12800, 128), Stretch((32, 32), "bicubic").fit(12800, 128)) == 0


@given(st.tuples(SIDES, SIDES), st.floats(0.05, 1), st.sampled_from([1, 2, 4, 8]))
def test_any_crop_can_be_drawn(image: tuple[int, int], fraction: float, divisor: int) -> None:
    """Also of an image that was decoded at a fraction of its size; every byte is written."""
    fit = CenterCrop((8, 4), fraction, "bilinear")
    decoded = np.full((-(-image[1] // divisor), -(-image[0] // divisor), 3), 7, np.uint8)
    canvas = np.zeros((4, 8, 3), np.uint8)
    fit.draw(decoded, fit.fit(*image), canvas)

    assert (canvas == 7).all()


def test_an_image_is_decoded_large_enough_for_its_crop() -> None:
    """Four times the canvas, for the part that is seen, up to a pixel of it: the crop of the second image has 1791.125."""
    fit = CenterCrop((224, 224), 0.875, "bilinear")

    assert fit.fit(4096, 2048).min_decode_size == (2045, 1022)
    assert jpeg.reduced_size((4096, 2048), fit.fit(4096, 2048).min_decode_size) == (2048, 1024)
    assert jpeg.reduced_size((16384, 2047), fit.fit(16384, 2047).min_decode_size) == (8192, 1024)
    assert jpeg.reduced_size((4080, 2040), fit.fit(4080, 2040).min_decode_size) == (4080, 2040)
    assert Stretch((224, 224), "bilinear").fit(4096, 2048).min_decode_size == (896, 896)


def test_a_stretched_image_fills_the_canvas() -> None:
    fit = Stretch((50, 100), "bilinear")
    transform = fit.fit(200, 100)
    canvas = np.empty((100, 50, 3), np.uint8)
    fit.draw(gradient(200, 100), transform, canvas)

    assert transform == ImageTransform(0, 0, 50, 100, 200, 100)
    np.testing.assert_allclose(canvas[50, [0, 25, -1], 0], [2, 127, 248], atol=2)
    np.testing.assert_allclose(canvas[[0, 50, -1], 25, 1], [0, 126, 250], atol=2)


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (Stretch((50, 100), "bilinear").fit(200, 100), [40, 20, 200, 90]),
        (CenterCrop((50, 100), 1.0, "bilinear").fit(200, 100), [85, 20, 125, 90]),
        (CenterCrop((50, 100), 0.5, "bilinear").fit(200, 100), [93, 35, 113, 70]),
    ],
)
def test_boxes_find_their_way_back(transform: ImageTransform, expected: list[float]) -> None:
    """From pixels of the canvas to pixels of the image, each axis by itself, clipped to what the model saw."""
    found = transform.to_image(np.array([[10, 20, 60, 90]], np.float32))

    np.testing.assert_allclose(found, [expected], atol=0.01)
