"""Requests and their responses, without the network: what `Client` and `AsyncClient` have in common."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from itertools import islice
from pathlib import Path
from typing import Any, Generic, Literal, NamedTuple, TypedDict, TypeVar

import httpx
import msgspec

from nereid_client.errors import Problem, ProblemDocument, UnexpectedResponse
from nereid_client.pictures import Image, is_address, read
from nereid_client.prepare import Prepare, Shrunk, scaled, shrink
from nereid_client.results import ClassifyResult, Detection, DetectResult, ImageSize, ModelUsed, Result

T = TypeVar("T")
R = TypeVar("R", bound=Result)

MAX_BATCH = 64
"""Images in one request."""

_STAGE = re.compile(r'(\w+)(?:;desc="[^"]*")?;dur=([\d.]+)')


class Parameters(TypedDict, total=False):
    """Parameters of any request; the gateway has defaults for all of them, and checks them."""

    model: str
    version: str
    confidence: float
    """Minimum confidence, 0 to 1."""
    timeout_ms: int
    """Deadline in the gateway, milliseconds."""
    truncated: Literal["refuse", "allow"]
    """What becomes of a damaged JPEG."""


class DetectParameters(Parameters, total=False):
    """Parameters of a request for detections."""

    classes: str | list[str]
    """Names or ids of the classes to return: separated by commas, or one by one."""
    max_detections: int
    iou: float
    """Overlap above which only the better of two boxes of a class is returned, 0 to 1."""
    agnostic: bool
    """Whether boxes of different classes are compared, too."""
    boxes: Literal["normalized", "pixel"]


class ClassifyParameters(Parameters, total=False):
    """Parameters of a request for classes."""

    top_k: int


class Call(NamedTuple, Generic[T]):
    """One POST request, and how its response is read."""

    path: str
    options: dict[str, Any]
    """Arguments of httpx's `post`."""
    read: Callable[[httpx.Response], T]
    """Returns the result in a response; raises Problem or UnexpectedResponse."""


def detect(image: Image, prepare: Prepare | None, parameters: DetectParameters, *, draw: bool) -> Call[DetectResult]:
    """Make the request for the objects in one image."""
    options, shrunk = _body(image, prepare, {**parameters, "format": "image_and_json" if draw else "json"})

    def read_result(response: httpx.Response) -> DetectResult:
        return _restore(_read(response, DetectResult), shrunk, parameters)

    return Call("/detect", options, read_result)


def classify(image: Image, prepare: Prepare | None, parameters: ClassifyParameters) -> Call[ClassifyResult]:
    """Make the request for the classes of one image."""
    options, shrunk = _body(image, prepare, parameters)

    def read_result(response: httpx.Response) -> ClassifyResult:
        return _restore(_read(response, ClassifyResult), shrunk, {})

    return Call("/classify", options, read_result)


def batches(
    images: Iterable[Image], prepare: Prepare | None, parameters: DetectParameters
) -> Iterator[Call[list[DetectResult | Problem]]]:
    """Make the requests for the objects in images, as many in each as the gateway takes."""
    left = iter(images)
    while group := [*islice(left, MAX_BATCH)]:
        yield _batch(group, prepare, parameters)


def _batch(images: list[Image], prepare: Prepare | None, parameters: DetectParameters) -> Call[list[DetectResult | Problem]]:
    files: list[tuple[str, tuple[str | None, bytes]]] = []
    copies: list[Shrunk | None] = []
    for image in images:
        data, shrunk = (str(image).encode(), None) if is_address(image) else _shrunk(image, prepare)
        name = None if is_address(image) else "image" if isinstance(image, bytes) else Path(image).name
        files.append(("images", (name, data)))
        copies.append(shrunk)

    def read_results(response: httpx.Response) -> list[DetectResult | Problem]:
        lines, summary = _read_lines(response, len(images))
        return [
            Problem(line.status, line.problem) if line.problem else _restore(line.result(summary), shrunk, parameters)
            for line, shrunk in zip(lines, copies, strict=True)
        ]

    options = {"params": parameters, "files": files, "headers": {"Accept": "application/x-ndjson"}}
    return Call("/detect/batch", options, read_results)


def _body(image: Image, prepare: Prepare | None, parameters: Mapping[str, Any]) -> tuple[dict[str, Any], Shrunk | None]:
    if is_address(image):
        return {"params": {**parameters, "url": image}}, None
    data, shrunk = _shrunk(image, prepare)
    return {"params": parameters, "content": data, "headers": {"Content-Type": "application/octet-stream"}}, shrunk


def _shrunk(image: Image, prepare: Prepare | None) -> tuple[bytes, Shrunk | None]:
    data = read(image)
    shrunk = shrink(data, prepare) if prepare else None
    return shrunk.data if shrunk else data, shrunk


def _restore(result: R, shrunk: Shrunk | None, parameters: Mapping[str, Any]) -> R:
    """Make a result that of the original image."""
    if shrunk is None:
        return result
    original, sent = shrunk.upright(result.image), result.image
    changes: dict[str, Any] = {"image": original}
    if isinstance(result, DetectResult) and parameters.get("boxes") == "pixel":
        across, down = original.width / sent.width, original.height / sent.height
        changes["detections"] = [scaled(detection, across, down) for detection in result.detections]
    return msgspec.structs.replace(result, **changes)


def _read(response: httpx.Response, kind: type[R]) -> R:
    _require_success(response)
    try:
        result = msgspec.json.decode(response.content, type=kind)
    except ValueError as error:  # of msgspec
        raise UnexpectedResponse(f"{address(response.url)} does not respond as a gateway: {error}") from error
    timings = {stage: float(duration) for stage, duration in _STAGE.findall(response.headers.get("Server-Timing", ""))}
    return msgspec.structs.replace(result, timings=timings)


class _Summary(msgspec.Struct):
    """The last line of the response to a batch."""

    model: ModelUsed | None
    total_time_ms: float
    request_id: str


class _Line(msgspec.Struct):
    """The line of one image."""

    index: int
    status: int
    detections: list[Detection] = []
    image: ImageSize = ImageSize(0, 0)
    problem: ProblemDocument | None = None

    def result(self, summary: _Summary) -> DetectResult:
        assert summary.model  # noqa: S101 - any result has one
        return DetectResult(
            image=self.image,
            model=summary.model,
            total_time_ms=summary.total_time_ms,
            request_id=summary.request_id,
            detections=self.detections,
        )


def _read_lines(response: httpx.Response, images: int) -> tuple[list[_Line], _Summary]:
    """Return the lines of all images in their order, and the summary."""
    _require_success(response)
    try:
        *lines, summary = response.content.splitlines()
        read_lines = [msgspec.json.decode(line, type=_Line) for line in lines]
        if len(read_lines) != images:
            raise ValueError(f"{images} images were sent, {len(read_lines)} are in the response")  # noqa: TRY301
        return sorted(read_lines, key=lambda line: line.index), msgspec.json.decode(summary, type=_Summary)
    except ValueError as error:  # of msgspec
        raise UnexpectedResponse(f"{address(response.url)} does not respond as a gateway: {error}") from error


def _require_success(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        document = msgspec.json.decode(response.content, type=ProblemDocument)
    except ValueError:  # the body is a proxy's
        document = ProblemDocument(detail=response.reason_phrase, request_id=response.headers.get("X-Request-ID", ""))
    raise Problem(response.status_code, document, _retry_after(response))


def address(url: httpx.URL) -> str:
    """Return the address of a server for messages, without a password."""
    return str(url.copy_with(userinfo=b"", path="/", query=None))


def _retry_after(response: httpx.Response) -> float | None:
    """Return the seconds in `Retry-After`, which may also be a date (RFC 9110, 10.2.3)."""
    value = response.headers.get("Retry-After", "")
    if value.isdecimal():
        return float(value)
    try:
        return max(0.0, (parsedate_to_datetime(value) - datetime.now(UTC)).total_seconds())
    except (TypeError, ValueError):
        return None
