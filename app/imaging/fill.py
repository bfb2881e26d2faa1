"""Fill the whole of the model's input with an image: with its middle, or with all of it, stretched."""

from operator import truediv
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.imaging.resize import Interpolation, resample, resize_into
from app.imaging.transform import Crop, ImageTransform

# A product such as 224 * (500 / 224) may be a little less than the whole number that it should be.
_TOLERANCE = 1e-6
# What is far from the canvas is cut before the image is resized, which else could take much memory.
_MAX_RESIZED = 4


class CenterCrop(NamedTuple):
    """Takes the middle of an image, with the aspect ratio of the canvas.

    As torchvision and timm do for classifiers: the image is resized, averaging where it shrinks, and then cut.
    """

    canvas_size: tuple[int, int]
    """Width and height, pixels."""
    fraction: float
    """Part of the side that limits the crop, the shorter one for a square canvas, that is kept; above 0, at most 1."""
    interpolation: Interpolation

    def fit(self, width: int, height: int) -> ImageTransform:
        """Find the middle of an image of this size.

        The crop has whole pixels; what `draw` cuts differs by less than one.
        """
        canvas_width, canvas_height = self.canvas_size
        scale = self.fraction * min(width / canvas_width, height / canvas_height)
        crop_width, crop_height = (max(1, int(side * scale + _TOLERANCE)) for side in self.canvas_size)
        crop = Crop((width - crop_width + 1) // 2, (height - crop_height + 1) // 2, crop_width, crop_height)
        return ImageTransform(0, 0, canvas_width, canvas_height, width, height, crop)

    def draw(self, pixels: NDArray[np.uint8], transform: ImageTransform, canvas: NDArray[np.uint8]) -> None:
        """Resize the middle of an image to the canvas.

        Args:
            pixels: UINT8 (height, width, 3) RGB, upright: the whole image, possibly decoded at a reduced size.
            transform: Of the image.
            canvas: UINT8 (height, width, 3) RGB; every byte of it is written.
        """
        size = transform.image_width, transform.image_height
        scale = max(map(truediv, self.canvas_size, size)) / self.fraction
        columns, rows = map(_middle, pixels.shape[1::-1], size, self.canvas_size, (scale, scale))
        resized = resample(pixels[rows.part, columns.part], (columns.resized, rows.resized), self.interpolation)
        canvas[:] = resized[rows.cut, columns.cut]


class Stretch(NamedTuple):
    """Takes an image as a whole, and resizes each axis by itself."""

    canvas_size: tuple[int, int]
    """Width and height, pixels."""
    interpolation: Interpolation

    def fit(self, width: int, height: int) -> ImageTransform:
        """Place an image of this size."""
        return ImageTransform(0, 0, *self.canvas_size, width, height)

    def draw(self, pixels: NDArray[np.uint8], transform: ImageTransform, canvas: NDArray[np.uint8]) -> None:
        """Resize an image to the canvas; the arguments are as those of `Letterbox.draw`."""
        resize_into(pixels, transform.area(canvas), self.interpolation)


class _Middle(NamedTuple):
    """The way of one axis of an image to that of a canvas."""

    part: slice
    """What is resized."""
    resized: int
    """To how many pixels."""
    cut: slice
    """What of them is the canvas."""


def _middle(decoded: int, true_size: int, target: int, scale: float) -> _Middle:
    """Find the middle of an axis.

    Args:
        decoded: Pixels of the image as it was decoded.
        true_size: Its true size.
        target: Pixels of the canvas.
        scale: By which the true size is resized.
    """
    resized = max(target, int(true_size * scale + _TOLERANCE))
    kept = min(resized, _MAX_RESIZED * target)
    length = max(1, round(decoded * kept / resized))
    first, left = (decoded - length) // 2, round((kept - target) / 2)
    return _Middle(slice(first, first + length), kept, slice(left, left + target))
