"""Describe what became of the images of a batch: in one document, or in lines."""

from collections import Counter
from collections.abc import Mapping
from copy import copy
from typing import Any, Literal, TypeVar, cast

import msgspec

from app.api.answering import problems
from app.api.answering.native import to_detections
from app.api.answering.schema import BoxFormat, ImageSize, ModelUsed, Problem
from app.api.batch.schema import BatchFailure, BatchResponse, BatchResult, BatchSummary, ImageLine
from app.api.context import RequestContext
from app.api.reports.metrics import count_image
from app.errors import GatewayError
from app.pipeline.call import Detections
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing

_OK = 200

T = TypeVar("T")


class BatchAnswer:
    """Describes each image when it is done, and all of them in the end; counts them for the metrics and the log."""

    def __init__(self, names: list[str | None], unit: BoxFormat, context: RequestContext, metrics: Metrics) -> None:
        """Describe images with these file names."""
        self._names = names
        self._unit = unit
        self._context = context
        self._metrics = metrics
        self._results: dict[int, msgspec.Raw] = {}
        self._failures: dict[int, msgspec.Raw] = {}
        self._codes: Counter[str] = Counter()
        self._processed = self._detections = 0
        self._model: ModelUsed | None = None

    def add(self, index: int, found: Detections | Exception, timing: Timing) -> None:
        """Describe an image for the document. Encoded at once: for all of them together the event loop would have to wait."""
        name = self._names[index]
        if isinstance(found, Exception):
            problem = self.count_failure(found, timing)
            self._failures[index] = _encode(BatchFailure(name, index, problem.detail, problem))
        else:
            self.count(found, timing)
            detections, size = to_detections(found, self._unit), ImageSize(found.width, found.height)
            self._results[index] = _encode(BatchResult(name, index, detections, len(detections), "success", None, size))

    def to_line(self, index: int, found: Detections | Exception, timing: Timing) -> bytes:
        """Describe an image in a line of its own."""
        name = self._names[index]
        if isinstance(found, Exception):
            problem = self.count_failure(found, timing)
            line = ImageLine(index, name, problem.status, problem=problem)
        else:
            self.count(found, timing)
            detections, size = to_detections(found, self._unit), ImageSize(found.width, found.height)
            line = ImageLine(index, name, _OK, detections, len(detections), size)
        return msgspec.json.encode(line) + b"\n"

    def document(self) -> bytes:
        """Describe all images."""
        failures = _in_order(self._failures) if self._failures else None
        return msgspec.json.encode(
            BatchResponse(
                len(self._names),
                self._processed,
                self._codes.total(),
                cast("Any", _in_order(self._results)),
                cast("Any", failures),
                self._status,
                self._model,
                round(self._context.timing.total, 2),
                self._context.request_id,
            )
        )

    def summary(self) -> bytes:
        """Describe all images in a last line."""
        summary = BatchSummary(
            len(self._names),
            self._processed,
            self._codes.total(),
            self._status,
            self._model,
            round(self._context.timing.total, 2),
            self._context.request_id,
        )
        return msgspec.json.encode(summary) + b"\n"

    def log(self) -> None:
        """Note for the log line what has been counted so far."""
        fields = {"images": len(self._names), "failed": self._codes.total(), "detections": self._detections}
        self._context.log_fields |= fields | ({"failures": dict(self._codes)} if self._codes else {})

    @property
    def _status(self) -> Literal["success", "all_failed"]:
        return "success" if self._processed else "all_failed"

    def count(self, found: Detections, timing: Timing) -> None:
        """Count an image that was done."""
        self._processed += 1
        self._detections += len(found.scores)
        self._model = ModelUsed.of(found)
        count_image(self._metrics, timing, _OK)

    def count_failure(self, error: Exception, timing: Timing) -> Problem:
        """Count an image that failed, and describe why."""
        problem = problems.to_problem(error, self._context.request_id)
        self._codes[problem.code] += 1
        count_image(self._metrics, timing, problem.status)
        return problem


def _encode(described: msgspec.Struct) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(described))


def _in_order(described: dict[int, T]) -> list[T]:
    return [described[index] for index in sorted(described)]


def copy_error(error: Exception) -> Exception:
    """Copy an error that is to be raised later: its traceback would refer to the image. An unexpected one has been logged."""
    return copy(error) if isinstance(error, GatewayError) else RuntimeError("an image of a batch failed")


def first_error(errors: Mapping[int, Exception], images: int) -> Exception:
    """Return the error of the first image that failed, by index; of several images, it says which one."""
    index, error = min(errors.items())
    if isinstance(error, GatewayError) and images > 1:
        error.detail = f"{len(errors)} of {images} images failed; at index {index}: {error.detail}"
    return error
