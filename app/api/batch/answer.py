"""The response to a batch: what becomes of its images; for detections one document, one line per image, or COCO results."""

from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from copy import copy
from typing import Any, Generic, Literal, TypeVar

import msgspec
from msgspec import UNSET, UnsetType

from app.api.answering import problems
from app.api.answering.native import to_coco_results, to_detections
from app.api.answering.schema import BoxFormat, Detection, ImageSize, ModelUsed, Problem, Timed
from app.api.context import RequestContext
from app.api.reports.metrics import count_batch_image
from app.errors import GatewayError
from app.pipeline.batch_request import BatchRequest
from app.pipeline.results import Detections
from app.telemetry.metrics import Metrics
from app.telemetry.timing import Timing

_OK = 200

R = TypeVar("R")
T = TypeVar("T")


class Placed(msgspec.Struct, kw_only=True):
    """What is said of an image, with its place if it is one of a batch."""

    filename: str | UnsetType | None = UNSET
    image_index: int | UnsetType = UNSET

    def totals(self) -> Mapping[str, int]:
        """Return what the image adds to the sums over a batch."""
        return {}


class BatchResult(msgspec.Struct, frozen=True):
    """The detections in one image of a batch."""

    filename: str | None
    image_index: int
    detections: list[Detection]
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
    problem: Problem
    """The response, including the status, that the image would get in a request of its own."""


class Documents(Timed, frozen=True, kw_only=True):
    """The results and the failures of a batch, each in the order of the request."""

    total_images: int
    processed_images: int
    failed_images: int
    results: Sequence[Any]
    failures: list[BatchFailure] | None
    status: Literal["success", "partial", "all_failed"]


class BatchResponse(Documents, frozen=True, kw_only=True):
    """The detections in the images of a batch."""

    results: list[BatchResult]
    model: ModelUsed | None


class ImagesAnswer(Generic[R, T]):
    """Keeps what becomes of each image of a batch, and counts images for metrics and log."""

    def __init__(
        self,
        names: Sequence[str | None],
        convert: Callable[[int, R], Awaitable[T]] | None,
        context: RequestContext,
        metrics: Metrics,
    ) -> None:
        """Prepare for images with these names; `convert` makes what is kept of each when it is done; None keeps the result."""
        self.totals: Counter[str] = Counter()
        self.converted: dict[int, T] = {}
        self.problems: dict[int, Problem] = {}
        self.model: ModelUsed | None = None
        self._names, self._images = names, len(names)
        self._convert = convert
        self._context = context
        self._metrics = metrics
        self._errors: dict[int, Exception] = {}

    async def add(self, index: int, found: R | Exception, timing: Timing) -> None:
        """Add the result of an image, or its error."""
        if isinstance(found, Exception):
            problem = self.problems[index] = problems.to_problem(found, self._context.request_id)
            # A copy, because the traceback refers to the image. An unexpected error is already logged.
            is_expected = isinstance(found, GatewayError)
            self._errors[index] = copy(found) if is_expected else RuntimeError("an image of a batch failed")
            count_batch_image(self._metrics, timing, self._context.caller, problem.status)
        else:
            await self.keep(index, found)
            count_batch_image(self._metrics, timing, self._context.caller, _OK)

    async def keep(self, index: int, found: R) -> None:
        """Add the result of an image without counting it in the metrics of batches."""
        if isinstance(found, Detections):
            self.totals["detections"] += len(found.scores)
            self.model = ModelUsed.of(found)
        kept: Any = found if self._convert is None else await self._convert(index, found)
        self.converted[index] = kept

    async def run(self, batch: BatchRequest[R]) -> None:
        """Add what becomes of each image of a batch, and log where the images of addresses were fetched."""
        async with batch.run(self.add) as done:
            for image in done:
                await image
        if batch.url_hosts:
            self._context.log_fields["url_hosts"] = batch.url_hosts

    def all(self) -> list[T]:
        """Return what was made of each image; if any failed, raise the error of the first, whose detail names the index."""
        if self._errors:
            index = min(self._errors)
            if isinstance(error := self._errors[index], GatewayError) and self._images > 1:
                error.detail = f"{len(self._errors)} of {self._images} images failed; at index {index}: {error.detail}"
            del error  # the traceback refers to this frame
            raise self._errors.pop(index)
        return [self.converted[index] for index in sorted(self.converted)]

    def log(self) -> None:
        """Add the counts so far to the request's log line."""
        codes = Counter(problem.code for problem in self.problems.values())
        fields = {"images": self._images, "failed": len(self.problems), **self.totals}
        self._context.log_fields |= fields | ({"failures": dict(codes)} if codes else {})

    def summary(self) -> dict[str, Any]:
        """Return what the response says of all images."""
        processed = len(self.converted)
        return {
            "total_images": self._images,
            "processed_images": processed,
            "failed_images": len(self.problems),
            "status": "all_failed" if not processed else "partial" if self.problems else "success",
            **self._context.ending,
        }

    def document(self: "ImagesAnswer[R, bytes]") -> dict[str, Any]:
        """Return the fields of `Documents`, with encoded results."""
        results = [msgspec.Raw(result) for _, result in sorted(self.converted.items())]
        return {"results": results, "failures": self.failures(), **self.summary()}

    def failures(self) -> list[BatchFailure] | None:
        """Describe the images that failed; None if there are none."""
        problems = sorted(self.problems.items())
        return [BatchFailure(self._names[index], index, problem.detail, problem) for index, problem in problems] or None


def to_result(names: Sequence[str | None], unit: BoxFormat, index: int, found: Detections) -> bytes:
    """Encode the result of an image for a document."""
    detections, size = to_detections(found, unit), ImageSize(found.width, found.height)
    return msgspec.json.encode(BatchResult(names[index], index, detections, len(detections), "success", None, size))


def to_document(answer: ImagesAnswer[Detections, bytes]) -> bytes:
    """Encode a whole document."""
    return msgspec.json.encode(BatchResponse(model=answer.model, **answer.document()))


def to_line(names: Sequence[str | None], unit: BoxFormat, index: int, found: Detections | Problem) -> bytes:
    """Encode the result of an image as one line. Its `status` is the one that the image would get in a request of its own."""
    line: dict[str, Any] = {"index": index, "filename": names[index]}
    if isinstance(found, Problem):
        line |= {"status": found.status, "problem": found}
    else:
        detections, size = to_detections(found, unit), ImageSize(found.width, found.height)
        line |= {"status": _OK, "detections": detections, "num_detections": len(detections), "image": size}
    return msgspec.json.encode(line) + b"\n"


def to_encoded_results(image_ids: Sequence[int], index: int, found: Detections) -> bytes:
    """Encode the COCO results of an image, without the brackets of their list."""
    return msgspec.json.encode(to_coco_results(found, image_ids[index]))[1:-1]
