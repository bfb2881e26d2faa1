"""Fit an image into the model's input with its aspect ratio kept, and map boxes back to the image.

Both directions live here so that they agree: the way back uses the rounded size that the image got on the canvas, per
axis, never the unrounded scale.
"""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.imaging.resize import Interpolation, resize_into


class Crop(NamedTuple):
    """A part of an image, in its pixels."""

    left: int
    top: int
    width: int
    height: int


class LetterboxTransform(NamedTuple):
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
        if self.crop is None:
            return 4 * self.width, 4 * self.height
        return -(-4 * self.width * self.image_width // self.crop.width), -(-4 * self.height * self.image_height // self.crop.height)

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


class Letterbox(NamedTuple):
    """How a model wants its images fitted."""

    canvas_size: tuple[int, int]
    """Width and height, pixels."""
    placement: Literal["center", "top_left"]
    enlarge: bool
    """Whether small images are enlarged to the canvas."""
    pad: int
    """Value of every byte around the image."""
    interpolation: Interpolation = "bilinear"
    """As in the detectors' training; see `resize_into`."""

    def fit(self, width: int, height: int) -> LetterboxTransform:
        """Fit an image of this size into the canvas, keeping its aspect ratio.

        The rounding is that of the detectors' own code, so that boxes agree to the pixel: Ultralytics, which centres
        images, rounds to the nearest pixel; YOLOX, which does not, truncates.
        Source: LetterBox in ultralytics/data/augment.py; preproc in yolox/data/data_augment.py.
        """
        is_centred = self.placement == "center"
        scale = min(self.canvas_size[0] / width, self.canvas_size[1] / height)
        if not self.enlarge:
            scale = min(scale, 1.0)
        to_pixels = round if is_centred else int
        inner_width, inner_height = (
            max(1, min(to_pixels(side * scale), limit)) for side, limit in zip((width, height), self.canvas_size, strict=True)
        )
        left, top = (
            round((outer - inner) / 2 - 0.1) if is_centred else 0
            for outer, inner in zip(self.canvas_size, (inner_width, inner_height), strict=True)
        )
        return LetterboxTransform(left, top, inner_width, inner_height, width, height)

    def draw(self, pixels: NDArray[np.uint8], transform: LetterboxTransform, canvas: NDArray[np.uint8]) -> None:
        """Resize an image into its area of the canvas, and write the padding around it.

        Args:
            pixels: UINT8 (height, width, 3) RGB, upright; it may be that area already.
            transform: Of the image on the canvas.
            canvas: UINT8 (height, width, 3) RGB; every byte of it is written.
        """
        rows = slice(transform.top, transform.top + transform.height)
        canvas[: rows.start] = self.pad
        canvas[rows.stop :] = self.pad
        canvas[rows, : transform.left] = self.pad
        canvas[rows, transform.left + transform.width :] = self.pad
        resize_into(pixels, transform.area(canvas), self.interpolation)
