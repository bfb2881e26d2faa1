"""The position of an image on the canvas, and the mapping of boxes back by its rounded size, per axis."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Crop(NamedTuple):
    """A part of an image, in pixels of the image. It may reach beyond the image at the top and bottom."""

    left: int
    top: float
    width: int
    height: float


class ImageTransform(NamedTuple):
    """Position on the canvas of an image of `image_width` x `image_height` or of a part of it, all in pixels."""

    left: int
    top: int
    width: int
    height: int
    image_width: int
    image_height: int
    crop: Crop | None = None
    """The part of the image that is on the canvas; None for the whole image."""

    @property
    def min_decode_size(self) -> tuple[int, int]:
        """Minimum width and height in pixels for decoding at a reduced size, which is faster, but averages pixels."""
        # From four times the size on the canvas, boxes hardly change (docs/explanation/decisions.md).
        width, height = 4 * self.width, 4 * self.height
        if self.crop is None:
            return width, height
        # Minus one, because the crop was rounded to whole pixels; otherwise the minimum could require twice the size.
        return (width - 1) * self.image_width // self.crop.width, int((height - 1) * self.image_height // self.crop.height)

    def area(self, canvas: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Return a view of the part of a canvas (height, width, 3) that the image covers."""
        return canvas[self.top : self.top + self.height, self.left : self.left + self.width]

    def to_image(self, boxes: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map boxes (n, 4) x1 y1 x2 y2 from pixels of the canvas to pixels of the image, clipped to it."""
        if not len(boxes):
            return boxes
        offset, size = np.array([[self.left, self.top] * 2, [self.width, self.height] * 2], np.float32)
        # So what is clipped lies exactly on the side of the image. Faster than np.clip.
        fractions: NDArray[np.float32] = np.minimum(np.maximum(boxes - offset, 0), size) / size
        if self.crop is None:
            return fractions * np.array([self.image_width, self.image_height] * 2, np.float32)
        left, top, width, height = self.crop
        return fractions * np.array([width, height] * 2, np.float32) + np.array([left, top] * 2, np.float32)

    def points_to_image(self, points: NDArray[np.float32]) -> NDArray[np.float32]:
        """Map points (..., 2) x y from pixels of the canvas to pixels of the image; those outside stay outside."""
        left, top, width, height = self.crop or (0, 0, self.image_width, self.image_height)
        scale = np.array([width / self.width, height / self.height], np.float32)
        mapped: NDArray[np.float32] = (points - np.array([self.left, self.top], np.float32)) * scale
        return mapped + np.array([left, top], np.float32)
