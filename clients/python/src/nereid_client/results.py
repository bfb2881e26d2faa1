"""The results of requests."""

from collections.abc import Iterable
from itertools import cycle
from math import atan2, pi
from typing import Annotated, Any, Self

import msgspec
from msgspec import Meta


class Rle(msgspec.Struct, frozen=True):
    """A mask in COCO's compressed run-length encoding, at the size of the upright image: height, width."""

    size: tuple[int, int]
    counts: str


class Keypoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """A keypoint, in the unit of the box."""

    x: float
    y: float
    name: str
    confidence: float | None = None
    """From 0 to 1; None if the model reports none."""


class Detection(msgspec.Struct, frozen=True, omit_defaults=True):
    """One object.

    `x1`, `y1`, `x2`, `y2` are the corners of its box, relative to the top left of the upright image: fractions of it, or with
    `boxes="pixel"` pixels.
    """

    x1: float
    y1: float
    x2: float
    y2: float
    confidence: float
    class_id: Annotated[int, Meta(ge=0, lt=1 << 20)]  # YOLO's list of names has a line for each number
    class_name: str
    mask: list[list[float]] | Rle | bytes | None = None
    """Of a segmentation: polygons x, y, x, y, ... in the unit of the box, an RLE, or a PNG, as `masks` asks."""
    mask_offset: tuple[int, int] | None = None
    """Column and row of the image at which the PNG begins."""
    keypoints: list[Keypoint] | None = None
    """Of a pose."""
    rotation: float | None = None
    """Of an oriented box: the angle of its first edge, a long one, in radians from 0 to pi, clockwise."""
    corners: list[tuple[float, float]] | None = None
    """Of an oriented box: x and y of its four corners, clockwise, in the unit of the box."""

    def scaled(self, across: float, down: float) -> "Detection":
        """Return the object, without RLE or PNG, in an image that is so many times as large; to 1/100 of a pixel."""

        def scale(numbers: Iterable[float]) -> list[float]:
            return [round(number * factor, 2) for number, factor in zip(numbers, cycle((across, down)), strict=False)]

        changes: dict[str, Any] = dict(zip(("x1", "y1", "x2", "y2"), scale((self.x1, self.y1, self.x2, self.y2)), strict=True))
        if isinstance(self.mask, list):
            changes["mask"] = [scale(part) for part in self.mask]
        if self.keypoints is not None:
            points = (scale((point.x, point.y)) for point in self.keypoints)
            changes["keypoints"] = [
                msgspec.structs.replace(point, x=x, y=y) for point, (x, y) in zip(self.keypoints, points, strict=True)
            ]
        if self.corners is not None:
            edges = [(x * across, y * down) for x, y in self.corners]
            changes["corners"] = [(round(x, 2), round(y, 2)) for x, y in edges]
            (x1, y1), (x2, y2), *_ = edges
            changes["rotation"] = round(atan2(y2 - y1, x2 - x1) % pi, 6)
        return msgspec.structs.replace(self, **changes)


class Classification(msgspec.Struct, frozen=True):
    """One class of an image, with its confidence."""

    class_id: int
    class_name: str
    confidence: float


class ImageSize(msgspec.Struct, frozen=True):
    """Size of the upright image (EXIF orientation applied), pixels."""

    width: Annotated[int, Meta(ge=1)]
    height: Annotated[int, Meta(ge=1)]


class ModelUsed(msgspec.Struct, frozen=True):
    """The model that produced the result."""

    name: str
    version: str
    backend: str
    device: str


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """What all results have."""

    total_time_ms: float
    """Time in the gateway, milliseconds; in a batch, that of all images together."""
    request_id: str
    """The id of the request in the gateway's log."""
    timings: dict[str, float] = {}
    """Duration of each stage and of each step in the gateway, milliseconds; empty for an image of a batch."""


class ImageAnswer(Answer, frozen=True, kw_only=True):
    """What all results of one image have."""

    image: ImageSize

    def of_original(self, original: ImageSize, *, in_pixels: bool) -> Self:
        """Return the result in an image of another size; `in_pixels`: whether boxes were asked for in pixels."""
        del in_pixels
        return msgspec.structs.replace(self, image=original)


class Result(ImageAnswer, frozen=True, kw_only=True):
    """What all results of one model have."""

    model: ModelUsed


class DetectResult(Result, frozen=True, kw_only=True):
    """The objects in one image, by descending confidence."""

    detections: list[Detection]
    visualization: bytes | None = None
    """The image with the objects drawn on it, as JPEG, if `draw` was set."""

    def of_original(self, original: ImageSize, *, in_pixels: bool) -> Self:
        """Return the result in an image of another size."""
        across, down = original.width / self.image.width, original.height / self.image.height
        found = [one.scaled(across, down) for one in self.detections] if in_pixels else self.detections
        return msgspec.structs.replace(self, image=original, detections=found)


class ClassifyResult(Result, frozen=True, kw_only=True):
    """The classes of one image, by descending confidence."""

    classifications: list[Classification]
