"""The JSON of a batch, as one document or in lines."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from app.api.answering.schema import Detection, ImageSize, ModelUsed, Problem


class BatchResult(msgspec.Struct, frozen=True):
    """The detections in one image of a batch."""

    filename: str | None
    image_index: int
    """Position in the request, from 0."""
    detections: list[Detection]
    """The detections, by descending confidence."""
    num_detections: int
    status: Literal["success"]
    pipeline: None
    """Always null, as `error`: present for clients of other gateways."""
    image: ImageSize
    error: None = None


class BatchFailure(msgspec.Struct, frozen=True):
    """The failure of one image of a batch."""

    filename: str | None
    index: int
    error: str
    """The problem's detail."""
    problem: Problem
    """The response, including the status, that the image would get in a request of its own."""


class BatchResponse(msgspec.Struct, frozen=True):
    """The results and the failures of a batch, each in the order of the request."""

    total_images: int
    processed_images: int
    failed_images: int
    results: list[BatchResult]
    failures: list[BatchFailure] | None
    status: Literal["success", "all_failed"]
    """`success` if at least one image succeeded."""
    model: ModelUsed | None
    """The model that produced the results; null if all images failed."""
    total_time_ms: float
    request_id: str


class ImageLine(msgspec.Struct, frozen=True):
    """The line of one image of a batch, with its detections or its problem."""

    index: int
    filename: str | None
    status: int
    """The status that the image would get in a request of its own."""
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
