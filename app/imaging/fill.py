"""Fill the whole of the model's input with an image: with its middle, or with all of it, stretched."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.imaging.letterbox import Crop, LetterboxTransform
from app.imaging.resize import Interpolation, resize_into

# A product such as 224 * (500 / 224) may be a little less than the whole number that it should be.
_TOLERANCE = 1e-6


class CenterCrop(NamedTuple):
    """Takes the middle of an image, with the aspect ratio of the canvas."""

    canvas_size: tuple[int, int]
    """Width and height, pixels."""
    fraction: float
    """Part of the side that limits the crop, the shorter one for a square canvas, that is kept; above 0, at most 1."""
    interpolation: Interpolation

    def fit(self, width: int, height: int) -> LetterboxTransform:
        """Find the middle of an image of this size.

        The crop has whole pixels, rounded down, as in the training of EfficientNets; to resize the image first and to cut it then
        differs by less than a pixel.
        """
        canvas_width, canvas_height = self.canvas_size
        scale = self.fraction * min(width / canvas_width, height / canvas_height)
        crop_width, crop_height = (max(1, int(side * scale + _TOLERANCE)) for side in self.canvas_size)
        crop = Crop((width - crop_width + 1) // 2, (height - crop_height + 1) // 2, crop_width, crop_height)
        return LetterboxTransform(0, 0, canvas_width, canvas_height, width, height, crop)

    def draw(self, pixels: NDArray[np.uint8], transform: LetterboxTransform, canvas: NDArray[np.uint8]) -> None:
        """Resize the middle of an image to the canvas.

        Args:
            pixels: UINT8 (height, width, 3) RGB, upright: the whole image, possibly decoded at a reduced size.
            transform: Of the image.
            canvas: UINT8 (height, width, 3) RGB; every byte of it is written.
        """
        crop = transform.crop
        if crop is not None:
            rows = _scale(crop.top, crop.height, transform.image_height, pixels.shape[0])
            columns = _scale(crop.left, crop.width, transform.image_width, pixels.shape[1])
            pixels = pixels[rows, columns]
        resize_into(pixels, canvas, self.interpolation)


class Stretch(NamedTuple):
    """Takes an image as a whole, and resizes each axis by itself."""

    canvas_size: tuple[int, int]
    """Width and height, pixels."""
    interpolation: Interpolation

    def fit(self, width: int, height: int) -> LetterboxTransform:
        """Place an image of this size."""
        return LetterboxTransform(0, 0, *self.canvas_size, width, height)

    def draw(self, pixels: NDArray[np.uint8], transform: LetterboxTransform, canvas: NDArray[np.uint8]) -> None:
        """Resize an image to the canvas; the arguments are as those of `Letterbox.draw`."""
        resize_into(pixels, transform.area(canvas), self.interpolation)


def _scale(start: int, length: int, true_size: int, size: int) -> slice:
    """Find a part of an axis with `true_size` pixels in one that was decoded with `size` of them."""
    first = min(round(start * size / true_size), size - 1)
    return slice(first, min(size, first + max(1, round(length * size / true_size))))
