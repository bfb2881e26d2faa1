"""Resizing into an area of a canvas."""

import numpy as np
import pytest

from app.imaging.resize import Interpolation, resize_into

GREY = np.array([[[100] * 3, [200] * 3]], np.uint8)


@pytest.mark.parametrize(("interpolation", "expected"), [("bilinear", [100, 125, 175, 200]), ("bicubic", [89, 123, 177, 211])])
def test_pixels_between_two_are_interpolated(interpolation: Interpolation, expected: list[int]) -> None:
    """Bicubic interpolation overshoots at an edge."""
    area = np.empty((1, 4, 3), np.uint8)
    resize_into(GREY, area, interpolation)

    np.testing.assert_allclose(area[0, :, 0], expected, atol=1)


def test_an_image_of_the_right_size_is_copied() -> None:
    """The target may be a part of a larger canvas, of which nothing else is written."""
    canvas = np.zeros((3, 4, 3), np.uint8)
    resize_into(GREY, canvas[1:2, 1:3], "bicubic")

    assert canvas[1, 1:3].tolist() == GREY[0].tolist()
    assert canvas.sum() == GREY.sum()


def test_an_image_that_is_there_already_stays() -> None:
    canvas = GREY.copy()
    resize_into(canvas, canvas, "bilinear")

    assert (canvas == GREY).all()
