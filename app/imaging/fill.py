"""Fill the whole of the model's input with an image: with its middle, or with all of it, stretched."""

from operator import truediv
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.imaging.resize import Interpolation, Span, resample_bytes, resample_into, resize_into
from app.imaging.transform import Crop, ImageTransform

# A product such as 224 * (500 / 224) may be a little less than the whole number that it should be.
_TOLERANCE = 1e-6


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
        height, width = pixels.shape[:2]
        resample_into(pixels, *self._middle((width, height), transform), canvas, self.interpolation)

    def draw_bytes(self, decoded_size: tuple[int, int], transform: ImageTransform) -> int:
        """Return how much memory `draw` takes, bytes, for pixels of this width and height."""
        return resample_bytes(decoded_size, *self._middle(decoded_size, transform), self.canvas_size, self.interpolation)

    def _middle(self, decoded_size: tuple[int, int], transform: ImageTransform) -> tuple[Span, Span]:
        """Find the columns and rows that become the canvas."""
        size = transform.image_width, transform.image_height
        scale = max(map(truediv, self.canvas_size, size)) / self.fraction
        columns, rows = map(_middle, decoded_size, size, self.canvas_size, (scale, scale))
        return columns, rows


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

    def draw_bytes(self, decoded_size: tuple[int, int], transform: ImageTransform) -> int:  # noqa: ARG002 - as each way has it
        """Return that `draw` takes next to no memory."""
        return 0


def _middle(decoded: int, true_size: int, target: int, scale: float) -> Span:
    """Find the middle of an axis, in whole pixels of the resized image.

    Args:
        decoded: Pixels of the image as it was decoded.
        true_size: Its true size.
        target: Pixels of the canvas.
        scale: By which the true size is resized.
    """
    resized = max(target, int(true_size * scale + _TOLERANCE))
    left = round((resized - target) / 2)
    return Span(left * decoded / resized, (left + target) * decoded / resized)
