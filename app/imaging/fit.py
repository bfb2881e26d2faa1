"""The ways to fit an image into the model's input: all of it with padding around, its middle, or stretched; and resizing."""

import math
from operator import truediv
from typing import Literal, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from app.imaging.transform import Crop, ImageTransform
from app.model.spec import ModelSpec
from app.model.triton_config import Interpolation

# A product such as 224 * (500 / 224) may be a little less than the whole number that it should be.
_TOLERANCE = 1e-6
_RGB_BYTES = 3
# The decoding threads already use all cores; more threads inside OpenCV would only compete for them.
cv2.setNumThreads(1)

_METHODS: dict[Interpolation, int] = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
_FILTERS: dict[Interpolation, Image.Resampling] = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
# How far they reach from the middle of a pixel, in pixels of the result when it shrinks.
_REACHES: dict[Interpolation, int] = {"bilinear": 1, "bicubic": 2}
_PILLOW_BYTES = 4


class Span(NamedTuple):
    """A part of an axis, in pixels, which may begin and end within one."""

    start: float
    end: float


class Letterbox(NamedTuple):
    """Keeps the aspect ratio of an image, and pads around it."""

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
        left, top, width, height = transform[:4]
        rows = canvas[top : top + height]
        canvas[:top] = self.pad
        canvas[top + height :] = self.pad
        rows[:, :left] = self.pad
        rows[:, left + width :] = self.pad
        resize_into(pixels, rows[:, left : left + width], self.interpolation)


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
        """Return how much memory pixels of this width and height and `draw` take, bytes."""
        copied = resample_bytes(decoded_size, *self._middle(decoded_size, transform), self.canvas_size, self.interpolation)
        return decoded_size[0] * decoded_size[1] * _RGB_BYTES + copied

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


Fit = Letterbox | CenterCrop | Stretch


def fit_for(spec: ModelSpec) -> Fit:
    """Make what fits images as a model wants it."""
    if spec.resize == "letterbox":
        return Letterbox(spec.input_size, spec.placement, spec.enlarge, spec.pad, spec.interpolation)
    if spec.resize == "center_crop":
        return CenterCrop(spec.input_size, spec.crop, spec.interpolation)
    return Stretch(spec.input_size, spec.interpolation)


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


def resize_into(pixels: NDArray[np.uint8], area: NDArray[np.uint8], interpolation: Interpolation) -> None:
    """Resize an image into an area of a canvas.

    The interpolation is between the four nearest pixels, or the sixteen nearest, as in the training of most detectors;
    `resample_into` averages when it shrinks, which changes scores and boxes.

    Args:
        pixels: UINT8 (height, width, 3) RGB; it may be that area already.
        area: UINT8 (height, width, 3) RGB; every byte of it is written.
        interpolation: Between which pixels.
    """
    if np.may_share_memory(pixels, area):
        return
    if pixels.shape == area.shape:
        area[:] = pixels
    else:
        cv2.resize(pixels, area.shape[1::-1], dst=area, interpolation=_METHODS[interpolation])


def resample_into(
    pixels: NDArray[np.uint8], columns: Span, rows: Span, canvas: NDArray[np.uint8], interpolation: Interpolation
) -> None:
    """Resize a part of an image with a filter that covers all pixels that become one, as in the training of most classifiers.

    The result is that of resizing the whole image and cutting it then.

    Args:
        pixels: UINT8 (height, width, 3) RGB, in one piece of memory.
        columns: Which part.
        rows: Which part.
        canvas: UINT8 (height, width, 3) RGB; every byte of it is written.
        interpolation: The filter.
    """
    height, width = canvas.shape[:2]
    left, right = _covered(columns, pixels.shape[1], width, interpolation)
    top, bottom = _covered(rows, pixels.shape[0], height, interpolation)
    # Pillow copies what it resizes, and needs no other copy if it is told how long the rows are.
    data = pixels[top:bottom].reshape(-1)[3 * left :]
    part = Image.frombuffer("RGB", (right - left, bottom - top), data, "raw", "RGB", pixels.strides[0], 1)
    box = columns.start - left, rows.start - top, columns.end - left, rows.end - top
    canvas[:] = np.asarray(part.resize((width, height), _FILTERS[interpolation], box))


def resample_bytes(
    size: tuple[int, int], columns: Span, rows: Span, canvas_size: tuple[int, int], interpolation: Interpolation
) -> int:
    """Return how much memory `resample_into` takes, bytes, but for some copies of the canvas.

    Args:
        size: Width and height of the image, pixels.
        columns: Which part is resized.
        rows: Which part is resized.
        canvas_size: Width and height, pixels.
        interpolation: The filter.
    """
    left, right = _covered(columns, size[0], canvas_size[0], interpolation)
    top, bottom = _covered(rows, size[1], canvas_size[1], interpolation)
    # Pillow resizes each row, and then each column.
    return (bottom - top) * (right - left + canvas_size[0]) * _PILLOW_BYTES


def _covered(span: Span, size: int, target: int, interpolation: Interpolation) -> tuple[int, int]:
    """Return start and end of the pixels of an axis that the filter covers."""
    reach = _REACHES[interpolation] * max(1.0, (span.end - span.start) / target) + 1
    return max(0, math.floor(span.start - reach)), min(size, math.ceil(span.end + reach))
