"""The results of requests."""

from typing import Annotated

import msgspec
from msgspec import Meta


class Detection(msgspec.Struct, frozen=True):
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

    def scaled(self, across: float, down: float) -> "Detection":
        """Return the object in an image that is so many times as large; corners to 1/100 of a pixel."""
        x1, y1, x2, y2 = (
            round(corner * scale, 2) for corner, scale in zip((self.x1, self.y1, self.x2, self.y2), (across, down) * 2, strict=True)
        )
        return msgspec.structs.replace(self, x1=x1, y1=y1, x2=x2, y2=y2)


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


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """What all results have."""

    image: ImageSize
    model: ModelUsed
    total_time_ms: float
    """Time in the gateway, milliseconds; in a batch, that of all images together."""
    request_id: str
    """The id of the request in the gateway's log."""
    timings: dict[str, float] = {}
    """Duration of each stage in the gateway, milliseconds; empty for an image of a batch."""


class DetectResult(Result, frozen=True, kw_only=True):
    """The objects in one image, by descending confidence."""

    detections: list[Detection]
    visualization: bytes | None = None
    """The image with the boxes drawn on it, as JPEG, if `draw` was set."""


class ClassifyResult(Result, frozen=True, kw_only=True):
    """The classes of one image, by descending confidence."""

    classifications: list[Classification]
