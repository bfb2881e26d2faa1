"""The JSON of a batch, in one document or in lines."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from app.api.answering.schema import Detection, ImageSize, ModelUsed, Problem


class BatchResult(msgspec.Struct, frozen=True):
    """What was found in one image of a batch."""

    filename: str | None
    image_index: int
    """From 0, in the order of the request."""
    detections: list[Detection]
    """By descending confidence."""
    num_detections: int
    status: Literal["success"]
    pipeline: None
    """For clients of other gateways, as `error`."""
    image: ImageSize
    error: None = None


class BatchFailure(msgspec.Struct, frozen=True):
    """Why one image of a batch failed."""

    filename: str | None
    index: int
    error: str
    """The problem's detail."""
    problem: Problem
    """What the image would have been answered if it had been alone; the status, too."""


class BatchResponse(msgspec.Struct, frozen=True):
    """The images of a batch in the order of the request: those that were done, and those that failed."""

    total_images: int
    processed_images: int
    failed_images: int
    results: list[BatchResult]
    failures: list[BatchFailure] | None
    status: Literal["success", "all_failed"]
    """`success` as long as any image was done."""
    model: ModelUsed | None
    """None if all have failed."""
    total_time_ms: float
    request_id: str


class ImageLine(msgspec.Struct, frozen=True):
    """One image of a batch, in a line of its own: with its detections, or with its problem."""

    index: int
    filename: str | None
    status: int
    """What the image would have been answered if it had been alone."""
    detections: list[Detection] | UnsetType = UNSET
    num_detections: int | UnsetType = UNSET
    image: ImageSize | UnsetType = UNSET
    problem: Problem | UnsetType = UNSET


class BatchSummary(msgspec.Struct, frozen=True):
    """The last line of a batch."""

    total_images: int
    processed_images: int
    failed_images: int
    status: Literal["success", "all_failed"]
    model: ModelUsed | None
    total_time_ms: float
    request_id: str
