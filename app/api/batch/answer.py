"""The response to a batch: one document, one line per image, or one list of COCO results."""

from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, Literal

import msgspec

from app.api.answering import problems
from app.api.answering.native import to_coco_results, to_detections
from app.api.answering.schema import BoxFormat, Detection, ImageSize, ModelUsed, Problem
from app.api.context import RequestContext
from app.api.reports.metrics import count_batch_image
from app.errors import GatewayError
from app.pipeline.call import Detections
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing

_OK = 200


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


class BatchAnswer:
    """Encodes the result of each image when it is done and then the whole response; counts images for metrics and log."""

    def __init__(self, names: list[str | None], unit: BoxFormat, context: RequestContext, metrics: Metrics) -> None:
        self._names = names
        self._unit = unit
        self._context = context
        self._metrics = metrics
        self._results: dict[int, bytes] = {}
        self._failures: dict[int, bytes] = {}
        self._codes: Counter[str] = Counter()
        self._processed = self._detections = 0
        self._model: ModelUsed | None = None

    def add(self, index: int, found: Detections | Exception, timing: Timing) -> None:
        """Add an image to the document. It is encoded now: encoding all images together would block the event loop."""
        name = self._names[index]
        if isinstance(found, Exception):
            problem = self.count_failure(found, timing)
            self._failures[index] = msgspec.json.encode(BatchFailure(name, index, problem.detail, problem))
        else:
            self.count(found, timing)
            detections, size = to_detections(found, self._unit), ImageSize(found.width, found.height)
            result = BatchResult(name, index, detections, len(detections), "success", None, size)
            self._results[index] = msgspec.json.encode(result)

    def to_line(self, index: int, found: Detections | Exception, timing: Timing) -> bytes:
        """Encode the result of an image as one line. Its `status` is the one that the image would get in a request of its own."""
        line: dict[str, Any] = {"index": index, "filename": self._names[index]}
        if isinstance(found, Exception):
            problem = self.count_failure(found, timing)
            line |= {"status": problem.status, "problem": problem}
        else:
            self.count(found, timing)
            detections, size = to_detections(found, self._unit), ImageSize(found.width, found.height)
            line |= {"status": _OK, "detections": detections, "num_detections": len(detections), "image": size}
        return msgspec.json.encode(line) + b"\n"

    def document(self) -> bytes:
        """Encode the whole document."""
        results: Any = _in_order(self._results)
        failures: Any = _in_order(self._failures) or None
        return msgspec.json.encode(BatchResponse(results=results, failures=failures, **self._summary()))

    def summary(self) -> bytes:
        """Encode the summary, the last line."""
        return msgspec.json.encode(self._summary()) + b"\n"

    def log(self) -> None:
        """Add the counts so far to the request's log line."""
        fields = {"images": len(self._names), "failed": self._codes.total(), "detections": self._detections}
        self._context.log_fields |= fields | ({"failures": dict(self._codes)} if self._codes else {})

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

    def _summary(self) -> dict[str, Any]:
        return {
            "total_images": len(self._names),
            "processed_images": self._processed,
            "failed_images": self._codes.total(),
            "status": "success" if self._processed else "all_failed",
            "model": self._model,
            "total_time_ms": round(self._context.timing.total, 2),
            "request_id": self._context.request_id,
        }


class CocoAnswer(BatchAnswer):
    """Collects the results of all images. One failure fails the batch: the list cannot tell it from an image without objects."""

    def __init__(self, names: list[str | None], image_ids: Sequence[int], context: RequestContext, metrics: Metrics) -> None:
        super().__init__(names, "coco", context, metrics)
        self._image_ids = image_ids
        self._errors: dict[int, Exception] = {}

    def add(self, index: int, found: Detections | Exception, timing: Timing) -> None:
        """Add the results of an image."""
        if isinstance(found, Exception):
            self.count_failure(found, timing)
            self._errors[index] = copy_error(found)
        else:
            self.count(found, timing)
            self._results[index] = msgspec.json.encode(to_coco_results(found, self._image_ids[index]))

    def document(self) -> bytes:
        """Encode the results of all images, or raise the error of the first failed image, whose detail names the index."""
        if self._errors:
            raise first_error(self._errors, len(self._image_ids))
        without_brackets = (self._results[index][1:-1] for index in sorted(self._results))
        return b"[%b]" % b",".join(filter(None, without_brackets))


def _in_order(encoded: Mapping[int, bytes]) -> list[msgspec.Raw]:
    return [msgspec.Raw(encoded[index]) for index in sorted(encoded)]


def copy_error(error: Exception) -> Exception:
    """Copy an error to raise later, because its traceback refers to the image. An unexpected error is already logged."""
    return copy(error) if isinstance(error, GatewayError) else RuntimeError("an image of a batch failed")


def first_error(errors: Mapping[int, Exception], images: int) -> Exception:
    """Return the error of the first failed image, by index. If the batch has several images, the detail names the index."""
    index, error = min(errors.items())
    if isinstance(error, GatewayError) and images > 1:
        error.detail = f"{len(errors)} of {images} images failed; at index {index}: {error.detail}"
    return error
