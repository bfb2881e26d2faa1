"""Where an image lies on the canvas, and the way of boxes back to the image.

The way back uses the rounded size that the image got on the canvas, per axis, never the unrounded scale.
"""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Crop(NamedTuple):
    """A part of an image, in its pixels."""

    left: int
    top: int
    width: int
    height: int


class ImageTransform(NamedTuple):
    """Where an image of `image_width` x `image_height`, or a part of it, lies on the canvas, all in pixels."""

    left: int
    top: int
    width: int
    height: int
    image_width: int
    image_height: int
    crop: Crop | None = None
    """The part of the image that lies there; None for the whole image."""

    @property
    def min_decode_size(self) -> tuple[int, int]:
        """Minimum width and height in pixels to decode at, for a format that can be decoded at a reduced size.

        Reduced decoding is faster, but averages pixels; from four times the size on the canvas it no longer shows in
        the boxes (README, Decisions).
        """
        width, height = 4 * self.width, 4 * self.height
        if self.crop is None:
            return width, height
        # Less one: the crop was rounded to whole pixels, which else could make both axes ask for twice the size.
        return (width - 1) * self.image_width // self.crop.width, (height - 1) * self.image_height // self.crop.height

    def area(self, canvas: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """View the part of a canvas (height, width, 3) that the image covers."""
        return canvas[self.top : self.top + self.height, self.left : self.left + self.width]

    def to_image(self, boxes: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map boxes (n, 4) x1 y1 x2 y2 from pixels of the canvas to pixels of the image, clipped to it."""
        if not len(boxes):
            return boxes
        offset, size = np.array([[self.left, self.top] * 2, [self.width, self.height] * 2], np.float32)
        inside: NDArray[np.float32] = np.minimum(np.maximum(boxes - offset, 0), size)  # faster than np.clip
        if self.crop is None:
            return inside * np.array([self.image_width / self.width, self.image_height / self.height] * 2, np.float32)
        left, top, width, height = self.crop
        return inside * np.array([width / self.width, height / self.height] * 2, np.float32) + np.array([left, top] * 2, np.float32)
