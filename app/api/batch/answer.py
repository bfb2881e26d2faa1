"""The response to a batch: one document, or one line per image."""

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
from app.api.reports.metrics import count_batch_image
from app.errors import GatewayError
from app.pipeline.call import Detections
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing

_OK = 200

T = TypeVar("T")


class BatchAnswer:
    """Encodes the result of each image when it is done and then the whole response; counts images for metrics and log."""

    def __init__(self, names: list[str | None], unit: BoxFormat, context: RequestContext, metrics: Metrics) -> None:
        """Prepare the response for images with these file names."""
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
        """Add an image to the document. It is encoded now: encoding all images together would block the event loop."""
        name = self._names[index]
        if isinstance(found, Exception):
            problem = self.count_failure(found, timing)
            self._failures[index] = _encode(BatchFailure(name, index, problem.detail, problem))
        else:
            self.count(found, timing)
            detections, size = to_detections(found, self._unit), ImageSize(found.width, found.height)
            self._results[index] = _encode(BatchResult(name, index, detections, len(detections), "success", None, size))

    def to_line(self, index: int, found: Detections | Exception, timing: Timing) -> bytes:
        """Encode the result of an image as one line."""
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
        """Encode the whole document."""
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
        """Encode the summary, the last line."""
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
        """Add the counts so far to the request's log line."""
        fields = {"images": len(self._names), "failed": self._codes.total(), "detections": self._detections}
        self._context.log_fields |= fields | ({"failures": dict(self._codes)} if self._codes else {})

    @property
    def _status(self) -> Literal["success", "all_failed"]:
        return "success" if self._processed else "all_failed"

    def count(self, found: Detections, timing: Timing) -> None:
        """Count an image that succeeded."""
        self._processed += 1
        self._detections += len(found.scores)
        self._model = ModelUsed.of(found)
        count_batch_image(self._metrics, timing, _OK)

    def count_failure(self, error: Exception, timing: Timing) -> Problem:
        """Count an image that failed, and return its problem."""
        problem = problems.to_problem(error, self._context.request_id)
        self._codes[problem.code] += 1
        count_batch_image(self._metrics, timing, problem.status)
        return problem


def _encode(described: msgspec.Struct) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(described))


def _in_order(described: dict[int, T]) -> list[T]:
    return [described[index] for index in sorted(described)]


def copy_error(error: Exception) -> Exception:
    """Copy an error to raise later, because its traceback refers to the image. An unexpected error is already logged."""
    return copy(error) if isinstance(error, GatewayError) else RuntimeError("an image of a batch failed")


def first_error(errors: Mapping[int, Exception], images: int) -> Exception:
    """Return the error of the first failed image, by index. If the batch has several images, the detail names the index."""
    index, error = min(errors.items())
    if isinstance(error, GatewayError) and images > 1:
        error.detail = f"{len(errors)} of {images} images failed; at index {index}: {error.detail}"
    return error
