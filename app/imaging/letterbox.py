"""Fit an image into the model's input with its aspect ratio kept."""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.imaging.resize import Interpolation, resize_into
from app.imaging.transform import ImageTransform


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

    def fit(self, width: int, height: int) -> ImageTransform:
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
        return ImageTransform(left, top, inner_width, inner_height, width, height)

    def draw(self, pixels: NDArray[np.uint8], transform: ImageTransform, canvas: NDArray[np.uint8]) -> None:
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

    def draw_bytes(self, decoded_size: tuple[int, int], transform: ImageTransform) -> int:  # noqa: ARG002 - as each way has it
        """Return that `draw` takes next to no memory."""
        return 0
