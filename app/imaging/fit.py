"""Fit an image into the model's input: with a letterbox, a centre crop or a stretch."""

import math
from operator import truediv
from typing import Literal, NamedTuple

import cv2
import numpy as np
from numpy.typing import NDArray
from PIL import Image

from app.imaging.jpeg import reduced_size
from app.imaging.transform import Crop, ImageTransform
from app.model.spec import ModelSpec
from app.model.triton_config import Interpolation

# Rounding error of products such as 224 * (500 / 224), which may be slightly less than the exact integer.
_TOLERANCE = 1e-6
_RGB_BYTES = 3
# Sides of the input of a text detector are multiples of this.
_STRIDE = 32
# RapidOCR's limits of the sides of a page, pixels, and of its width divided by its height.
_MIN_PAGE_SIDE, _MAX_PAGE_SIDE, _MAX_PAGE_RATIO = 30, 2000, 8
# To which a page is enlarged that would be less than a 128th as wide as long; RapidOCR makes it any number of gigabytes.
_MAX_THIN_SIDE = 4096
# The decoding threads already use all cores; more threads inside OpenCV would only compete for them.
cv2.setNumThreads(1)

_METHODS: dict[Interpolation, int] = {"bilinear": cv2.INTER_LINEAR, "bicubic": cv2.INTER_CUBIC}
_FILTERS: dict[Interpolation, Image.Resampling] = {"bilinear": Image.Resampling.BILINEAR, "bicubic": Image.Resampling.BICUBIC}
# Radius of the filters, in pixels of the result if the image shrinks.
_REACHES: dict[Interpolation, int] = {"bilinear": 1, "bicubic": 2}
_PILLOW_BYTES = 4


class Letterbox(NamedTuple):
    """Keeps the aspect ratio of an image, with padding around it."""

    canvas_size: tuple[int, int]
    """Width and height, pixels."""
    placement: Literal["center", "top_left"]
    enlarge: bool
    pad: int
    """Value of every byte around the image."""
    interpolation: Interpolation = "bilinear"
    shapes: tuple[tuple[int, int], ...] = ()
    """Width and height of canvases within `canvas_size`, ascending, of which the first that holds the image is used."""

    def fit(self, width: int, height: int) -> ImageTransform:
        """Return where an image of this size lies on its canvas."""
        # Rounded as by the detectors, so that boxes agree to the pixel: Ultralytics, which centres, to the nearest; YOLOX down.
        # Source: LetterBox in ultralytics/data/augment.py; preproc in yolox/data/data_augment.py.
        is_centred = self.placement == "center"
        canvas_width, canvas_height = self.canvas_size
        scale = min(canvas_width / width, canvas_height / height)
        if not self.enlarge:
            scale = min(scale, 1.0)
        to_pixels = round if is_centred else int
        inner_width = max(1, min(to_pixels(width * scale), canvas_width))
        inner_height = max(1, min(to_pixels(height * scale), canvas_height))
        if self.shapes:
            canvas_width, canvas_height = self.shape_for(inner_width, inner_height)
        left = round((canvas_width - inner_width) / 2 - 0.1) if is_centred else 0
        top = round((canvas_height - inner_height) / 2 - 0.1) if is_centred else 0
        return ImageTransform(left, top, inner_width, inner_height, width, height)

    def shape_for(self, width: int, height: int) -> tuple[int, int]:
        """Return width and height of the canvas for an image that has this size on it."""
        return next((shape for shape in self.shapes if shape[0] >= width and shape[1] >= height), self.canvas_size)

    def draw(self, pixels: NDArray[np.uint8], transform: ImageTransform, canvas: NDArray[np.uint8]) -> None:
        """Resize upright UINT8 (height, width, 3) RGB, perhaps a view of its area of the canvas, into that; write the padding."""
        left, top, width, height = transform[:4]
        rows = canvas[top : top + height]
        canvas[:top] = self.pad
        canvas[top + height :] = self.pad
        rows[:, :left] = self.pad
        rows[:, left + width :] = self.pad
        resize_into(pixels, rows[:, left : left + width], self.interpolation)


class CenterCrop(NamedTuple):
    """Keeps the centre of an image with the aspect ratio of the canvas: as torchvision and timm, which resize and then crop."""

    canvas_size: tuple[int, int]
    fraction: float
    """Fraction to keep of the side that limits the crop, for a square canvas the shorter one; above 0, at most 1."""
    interpolation: Interpolation

    def fit(self, width: int, height: int) -> ImageTransform:
        """Return the crop of an image of this size, in whole pixels; `draw` crops with a difference of less than a pixel."""
        canvas_width, canvas_height = self.canvas_size
        scale = self.fraction * min(width / canvas_width, height / canvas_height)
        crop_width, crop_height = (max(1, int(side * scale + _TOLERANCE)) for side in self.canvas_size)
        crop = Crop((width - crop_width + 1) // 2, (height - crop_height + 1) // 2, crop_width, crop_height)
        return ImageTransform(0, 0, canvas_width, canvas_height, width, height, crop)

    def draw(self, pixels: NDArray[np.uint8], transform: ImageTransform, canvas: NDArray[np.uint8]) -> None:
        """Resize the centre of UINT8 (height, width, 3) RGB, upright and contiguous, as if the whole image were resized first."""
        (start_x, end_x, left, right), (start_y, end_y, top, bottom) = self._middle(pixels.shape[1::-1], transform)
        # Pillow makes one copy. Without the stride, the part would have to be copied before.
        data = pixels[top:bottom].reshape(-1)[3 * left :]
        stride = _RGB_BYTES * pixels.shape[1]  # numpy's own may be any number if there is one row
        part = Image.frombuffer("RGB", (right - left, bottom - top), data, "raw", "RGB", stride, 1)
        box = start_x - left, start_y - top, end_x - left, end_y - top
        canvas[:] = np.asarray(part.resize(self.canvas_size, _FILTERS[self.interpolation], box))

    def draw_bytes(self, decoded_size: tuple[int, int], transform: ImageTransform) -> int:
        """Return the memory of a decoded image of this width and height and of `draw`, in bytes."""
        (_, _, left, right), (_, _, top, bottom) = self._middle(decoded_size, transform)
        # Pillow resizes the rows first, into an intermediate image as wide as the canvas.
        copied = (bottom - top) * (right - left + self.canvas_size[0]) * _PILLOW_BYTES
        return decoded_size[0] * decoded_size[1] * _RGB_BYTES + copied

    def _middle(self, decoded_size: tuple[int, ...], transform: ImageTransform) -> list[tuple[float, float, int, int]]:
        # For columns and rows of the decoded image: the ends of what becomes the canvas, and of what the filter reads.
        size = transform.image_width, transform.image_height
        scale = max(map(truediv, self.canvas_size, size)) / self.fraction
        found = []
        for decoded, true_size, target in zip(decoded_size, size, self.canvas_size, strict=True):
            resized = max(target, int(true_size * scale + _TOLERANCE))
            left = round((resized - target) / 2)
            start, end = left * decoded / resized, (left + target) * decoded / resized
            reach = _REACHES[self.interpolation] * max(1.0, (end - start) / target) + 1
            found.append((start, end, max(0, math.floor(start - reach)), min(decoded, math.ceil(end + reach))))
        return found


class Stretch(NamedTuple):
    """Resizes each axis of an image separately."""

    canvas_size: tuple[int, int]
    interpolation: Interpolation

    def fit(self, width: int, height: int) -> ImageTransform:
        """Return the transform of an image of this size, which covers the whole canvas."""
        return ImageTransform(0, 0, *self.canvas_size, width, height)

    def draw(self, pixels: NDArray[np.uint8], transform: ImageTransform, canvas: NDArray[np.uint8]) -> None:
        """Resize an image to the canvas; the arguments are those of `Letterbox.draw`."""
        resize_into(pixels, transform.area(canvas), self.interpolation)


class Page(NamedTuple):
    """Resizes an image for a text detector as RapidOCR does, so that boxes agree. Very wide images get black above and below."""

    max_pixels: int
    """Maximum of width times height of the canvas. RapidOCR has none; larger canvases keep their aspect ratio."""
    min_side: int
    """Minimum of the shorter side of the canvas, pixels."""
    interpolation: Interpolation

    def fit(self, width: int, height: int) -> ImageTransform:
        """Return the transform of an image; its crop covers the canvas. Source: DetPreProcess in rapidocr/ch_ppocr_det/utils.py."""
        page_width, page_height = page_size(width, height)
        padding = _padding(page_width, page_height)
        padded = page_height + 2 * padding
        ratio = max(1.0, self.min_side / min(page_width, padded))
        columns, rows = (_to_stride(int(side * ratio)) for side in (page_width, padded))
        if columns * rows > self.max_pixels:
            shrink = math.sqrt(self.max_pixels / (columns * rows))
            columns, rows = (max(1, int(side * shrink / _STRIDE)) * _STRIDE for side in (columns, rows))
        scale = height / page_height
        crop = Crop(0, -padding * scale, width, padded * scale) if padding else None
        return ImageTransform(0, 0, columns, rows, width, height, crop)

    def draw(self, pixels: NDArray[np.uint8], transform: ImageTransform, canvas: NDArray[np.uint8]) -> None:
        """Resize an image to its page, and that to the canvas; the arguments are those of `Letterbox.draw`."""
        # It copies at most 4 million pixels: a page with a shorter side of at least `min_side` is the canvas itself.
        page = page_size(transform.image_width, transform.image_height)
        if page not in {pixels.shape[1::-1], canvas.shape[1::-1]}:
            pixels = cv2.resize(pixels, page, interpolation=_METHODS[self.interpolation])  # type: ignore[assignment]
        if padding := _padding(*page):
            pixels = cv2.copyMakeBorder(pixels, padding, padding, 0, 0, cv2.BORDER_CONSTANT)  # type: ignore[assignment]
        resize_into(pixels, canvas, self.interpolation)


def page_size(width: int, height: int) -> tuple[int, int]:
    """Return the size that RapidOCR gives to an image before all else, in whose pixels it rounds what it finds."""
    # Source: resize_image_within_bounds in rapidocr/utils/process_img.py, which rejects some images that are thinner than a pixel.
    if max(width, height) > _MAX_PAGE_SIDE:
        ratio = _MAX_PAGE_SIDE / max(width, height)
        width, height = _to_stride(int(width * ratio)), _to_stride(int(height * ratio))
    if min(width, height) < _MIN_PAGE_SIDE:
        ratio = _MIN_PAGE_SIDE / min(width, height)
        width, height = (min(_to_stride(int(side * ratio)), _MAX_THIN_SIDE) for side in (width, height))
    return width, height


def _padding(page_width: int, page_height: int) -> int:
    # The height of the black above a page, and of that below it. Source: rapidocr/utils/process_img.py.
    if page_height > _MIN_PAGE_SIDE and page_width <= _MAX_PAGE_RATIO * page_height:
        return 0
    return (max(page_width // _MAX_PAGE_RATIO, _MIN_PAGE_SIDE) * 2 - page_height) // 2


def _to_stride(side: int) -> int:
    return max(_STRIDE, round(side / _STRIDE) * _STRIDE)


class Line(NamedTuple):
    """Resizes an image of a line of text to the height of the input, and pads it on the right, or squeezes a very long one."""

    height: int
    widths: tuple[int, ...]
    """Widths of the canvas, ascending, of which the first into which the line fits is used."""
    pad: int
    interpolation: Interpolation

    def fit(self, width: int, height: int) -> ImageTransform:
        """Return where an image of this size lies on its canvas."""
        wanted = math.ceil(self.height * width / height)
        return ImageTransform(0, 0, max(1, min(wanted, self.widths[-1])), self.height, width, height)

    def draw(self, pixels: NDArray[np.uint8], transform: ImageTransform, canvas: NDArray[np.uint8]) -> None:
        """Resize an image into its area of the canvas, and write the padding; the arguments are those of `Letterbox.draw`."""
        canvas[:, transform.width :] = self.pad
        resize_into(pixels, transform.area(canvas), self.interpolation)

    def canvas_width(self, transform: ImageTransform) -> int:
        """Return the width of the canvas for an image."""
        return next(width for width in self.widths if width >= transform.width)


Fit = Letterbox | CenterCrop | Stretch | Page | Line


def fit_for(spec: ModelSpec) -> Fit:
    """Return the fit that the config of a model specifies."""
    if spec.resize == "letterbox":
        return Letterbox(spec.input_size, spec.placement, spec.enlarge, spec.pad, spec.interpolation, spec.shapes)
    if spec.resize == "center_crop":
        return CenterCrop(spec.input_size, spec.crop, spec.interpolation)
    if spec.resize == "text":
        return Page(math.prod(spec.input_size), spec.min_side, spec.interpolation)
    if spec.resize == "line":
        return Line(spec.input_size[1], spec.widths, spec.pad, spec.interpolation)
    return Stretch(spec.input_size, spec.interpolation)


def canvas_size(fit: Fit, transform: ImageTransform) -> tuple[int, int]:
    """Return width and height of the canvas for an image with this transform."""
    if isinstance(fit, Page):
        return transform.width, transform.height
    if isinstance(fit, Letterbox):
        return fit.shape_for(transform.width, transform.height)
    return (fit.canvas_width(transform), fit.height) if isinstance(fit, Line) else fit.canvas_size


def shrink(pixels: NDArray[np.uint8], min_size: tuple[int, int]) -> NDArray[np.uint8]:
    """Return pixels (height, width, 3), contiguous and, as a JPEG is decoded, reduced by 2, 4 or 8, but not below `min_size`."""
    size = pixels.shape[1], pixels.shape[0]
    smaller = reduced_size(size, min_size)
    if smaller == size:
        return np.ascontiguousarray(pixels)
    return cv2.resize(pixels, smaller, interpolation=cv2.INTER_AREA)  # type: ignore[return-value]


def resize_into(pixels: NDArray[np.uint8], area: NDArray[np.uint8], interpolation: Interpolation) -> None:
    """Resize UINT8 (height, width, 3) RGB into an area of a canvas, of which it may be a view, without antialiasing."""
    # So most detectors are trained; antialiasing, as for classifiers, would change scores and boxes.
    if np.may_share_memory(pixels, area):
        return
    if pixels.shape == area.shape:
        area[:] = pixels
    else:
        cv2.resize(pixels, area.shape[1::-1], dst=area, interpolation=_METHODS[interpolation])
