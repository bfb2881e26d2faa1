"""Masks of objects: prototypes weighted by each object's coefficients, cropped to its box; as polygons, RLE or PNG.

The rules are those of Ultralytics' predictor for a fixed input: bilinear interpolation up to the input's size, above zero, cropped
to the box, the padding cut away, scaled to the image.
"""

from math import ceil
from typing import Any

import cv2
import numpy as np
from numpy.typing import NDArray

from app.detection.nms import Candidates
from app.errors import DeadlinePassed, InvalidModelOutput
from app.imaging.transform import ImageTransform
from app.resilience.deadline import Deadline
from app.segmentation.mask import Mask, MaskFormat

# Of all polygons of an image: hundreds for each of 300 objects. A model that returns noise would give millions.
_MAX_VERTICES = 100_000
_MIN_VERTICES = 3
_INVERSE = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP

Region = tuple[int, int, int, int]
"""x1 y1 x2 y2 in whole pixels, ends exclusive."""
_Mask = NDArray[np.uint8]


def make_masks(  # noqa: PLR0913, PLR0917 - what masks are made of
    model: str,
    found: Candidates,
    prototypes: NDArray[Any],
    input_size: tuple[int, int],
    transform: ImageTransform,
    mask_format: MaskFormat,
    deadline: Deadline,
) -> list[Mask]:
    """Make the masks of the objects in an image.

    The boxes are in pixels of the input, the features are the coefficients. The prototypes, FP16 or FP32 (coefficients, height,
    width), cover the input. Raises InvalidModelOutput, also for masks of noise, or DeadlinePassed.
    """
    assert found.features is not None  # noqa: S101 - the head has coefficients
    if prototypes.ndim != 3 or len(prototypes) != found.features.shape[1] or not prototypes.size:  # noqa: PLR2004
        raise InvalidModelOutput(
            f"{model} returned prototypes of shape {prototypes.shape} for {found.features.shape[1]} coefficients"
        )
    prototypes = prototypes.astype(np.float32)
    masks: list[Mask] = []
    vertices = 0
    for box, coefficients in zip(found.boxes, found.features, strict=True):
        if deadline.remaining <= 0:
            raise DeadlinePassed("there was no time for all masks")
        region = _to_region(box, transform)
        if region is None:
            masks.append(_encode(Mask([]), None, (0, 0, 0, 0), transform, mask_format))
            continue
        mask = _draw(prototypes, coefficients, region, input_size, model)
        parts = _to_polygons(mask, region, transform)
        vertices += sum(map(len, parts))
        if vertices > _MAX_VERTICES:
            raise InvalidModelOutput(f"{model} returned masks with more than {_MAX_VERTICES} vertices")
        masks.append(_encode(Mask(parts), mask, region, transform, mask_format))
    return masks


def _to_region(box: NDArray[np.float32], transform: ImageTransform) -> Region | None:
    """Return the pixels of the input in a box, without the padding; None if there are none."""
    left, top = transform.left, transform.top
    limits = np.array([left, top] * 2), np.array([left + transform.width, top + transform.height] * 2)
    x1, y1, x2, y2 = np.clip(np.ceil(box), *limits).astype(int).tolist()
    return (x1, y1, x2, y2) if x1 < x2 and y1 < y2 else None


def _draw(
    prototypes: NDArray[np.float32], coefficients: NDArray[np.float32], region: Region, input_size: tuple[int, int], model: str
) -> _Mask:
    """Return the mask, 0 or 255, of a region of the input."""
    channels, height, width = prototypes.shape
    x1, y1, x2, y2 = region
    x_scale, y_scale = width / input_size[0], height / input_size[1]
    # The prototypes' pixels between whose centres those of the region lie.
    left, right = max(0, int((x1 + 0.5) * x_scale - 0.5)), min(width, int((x2 - 0.5) * x_scale - 0.5) + 2)
    top, bottom = max(0, int((y1 + 0.5) * y_scale - 0.5)), min(height, int((y2 - 0.5) * y_scale - 0.5) + 2)
    with np.errstate(over="ignore", invalid="ignore"):
        logits = coefficients @ prototypes[:, top:bottom, left:right].reshape(channels, -1)
    if not np.isfinite(logits).all():
        raise InvalidModelOutput(f"{model} returned masks that are not finite")
    shift = (x1 + 0.5) * x_scale - 0.5 - left, (y1 + 0.5) * y_scale - 0.5 - top
    scaled = _warp(logits.reshape(bottom - top, right - left), (x_scale, y_scale), shift, (x2 - x1, y2 - y1))
    return (scaled > 0).astype(np.uint8) * np.uint8(255)


def _warp(values: NDArray[Any], scale: tuple[float, float], shift: tuple[float, float], size: tuple[int, int]) -> NDArray[Any]:
    """Return an array of this width and height, whose element at x, y is interpolated at x, y * `scale` + `shift`."""
    inverse = np.array([[scale[0], 0, shift[0]], [0, scale[1], shift[1]]])
    return cv2.warpAffine(values, inverse, size, flags=_INVERSE, borderMode=cv2.BORDER_REPLICATE)


def _to_polygons(mask: _Mask, region: Region, transform: ImageTransform) -> list[NDArray[np.float32]]:
    contours, _ = cv2.findContours(mask, cv2.RETR_EXTERNAL, cv2.CHAIN_APPROX_SIMPLE)
    offset = np.array(region[:2], np.float32)
    return [transform.points_to_image(contour[:, 0] + offset) for contour in contours if len(contour) >= _MIN_VERTICES]


def _encode(mask: Mask, pixels: _Mask | None, region: Region, transform: ImageTransform, mask_format: MaskFormat) -> Mask:
    """Add the encoded pixels (height, width) of a region of the input to a mask."""
    if mask_format not in {"rle", "png"}:
        return mask
    x, y, scaled = (0, 0, np.zeros((1, 1), np.uint8)) if pixels is None else _scale(pixels, region, transform)
    if mask_format == "png":
        return mask._replace(encoded=cv2.imencode(".png", scaled, [cv2.IMWRITE_PNG_BILEVEL, 1])[1].tobytes(), offset=(x, y))
    return mask._replace(encoded=_to_rle(scaled, x, y, transform.image_width, transform.image_height))


def _scale(pixels: _Mask, region: Region, transform: ImageTransform) -> tuple[int, int, _Mask]:
    """Return the column and row at which a region begins in the image, and its mask there, 0 or 255."""
    (start_x, start_y), (end_x, end_y) = transform.points_to_image(np.array(region, np.float32).reshape(2, 2)).tolist()
    x1, y1 = int(start_x), int(start_y)
    x2, y2 = min(ceil(end_x), transform.image_width), min(ceil(end_y), transform.image_height)
    # Zeros around the region, but at the edges of the image its own pixels.
    left, top = int(region[0] > transform.left), int(region[1] > transform.top)
    right, bottom = int(region[2] < transform.left + transform.width), int(region[3] < transform.top + transform.height)
    x_scale, y_scale = (region[2] - region[0]) / (end_x - start_x), (region[3] - region[1]) / (end_y - start_y)
    shift = (x1 + 0.5 - start_x) * x_scale - 0.5 + left, (y1 + 0.5 - start_y) * y_scale - 0.5 + top
    framed = cv2.copyMakeBorder(pixels, top, bottom, left, right, cv2.BORDER_CONSTANT)
    scaled = _warp(framed, (x_scale, y_scale), shift, (x2 - x1, y2 - y1))
    return x1, y1, (scaled > 128).astype(np.uint8) * np.uint8(255)  # noqa: PLR2004 - more than half


def _to_rle(mask: _Mask, x: int, y: int, width: int, height: int) -> dict[str, Any]:
    """Encode a mask, at this column and row of an image of width x height, without a mask of the whole image."""
    from pycocotools import mask as coco  # noqa: PLC0415 - an extra

    columns = np.zeros((mask.shape[1], mask.shape[0] + 2), np.uint8)
    columns[:, 1:-1] = cv2.transpose(mask)  # faster than numpy
    flat = columns.ravel()
    column, row = np.divmod(np.flatnonzero(flat[1:] != flat[:-1]), columns.shape[1])
    edges = (x + column) * height + y + row
    starts, ends = edges[::2], edges[1::2]
    # A run down to the end of a column goes on at the top of the next one.
    is_new = starts[1:] != ends[:-1]
    runs = np.stack([starts[np.r_[True, is_new][: len(starts)]], ends[np.r_[is_new, True][: len(ends)]]], axis=1)
    counts = np.diff(runs.ravel(), prepend=0, append=width * height).tolist()
    if counts[-1] == 0:
        counts.pop()
    encoded = coco.frPyObjects({"size": [height, width], "counts": counts}, height, width)
    return {"size": encoded["size"], "counts": encoded["counts"].decode()}
