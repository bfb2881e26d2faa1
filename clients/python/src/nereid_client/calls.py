"""Requests and their responses, without the network: what `Client` and `AsyncClient` have in common."""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeGuard, TypeVar
from urllib.parse import quote
from uuid import uuid4

import httpx
import msgspec

from nereid_client.answers import (
    Analysis,
    DeleteResult,
    EmbedBoxesResult,
    EmbedResult,
    FacesResult,
    IngestResult,
    OcrResult,
    PredictResult,
    SearchResult,
    Vector,
    VerifyResult,
)
from nereid_client.errors import Problem, ProblemDocument, UnexpectedResponse, address
from nereid_client.parameters import (
    AnalyzeParameters,
    ClassifyParameters,
    DetectParameters,
    EmbedParameters,
    FaceParameters,
    IngestParameters,
    OcrParameters,
    SearchParameters,
    VerifyParameters,
)
from nereid_client.pictures import Image
from nereid_client.prepare import Shrunk, shrink
from nereid_client.results import Answer, ClassifyResult, Detection, DetectResult, ImageAnswer, ImageSize, ModelUsed

T = TypeVar("T")
A = TypeVar("A", bound=Answer)

MAX_BATCH = 64
"""Images in one request."""

_OTHER_FIELDS = {"class", "bbox", "num_detections", "status"}
"""Fields of detections and of their answers that this client does not show."""
_STAGE = re.compile(r'(\w+)(?:;desc="[^"]*")?;dur=([\d.]+)')


class Call(NamedTuple, Generic[T]):
    """One request, and how its response is read."""

    path: str
    options: dict[str, Any]
    """Arguments of httpx's `post`."""
    read: Callable[[httpx.Response], T]
    """Returns the result in a response; raises Problem or UnexpectedResponse."""
    method: str = "POST"
    if_gone: T | None = None
    """The result if a repeated request finds nothing, because an earlier one, whose response was lost, has done it."""


def detect(image: Image, parameters: DetectParameters, *, draw: bool) -> Call[DetectResult]:
    """Make the request for the objects in one image."""
    return _single(_route(parameters), image, {**parameters, "format": "image_and_json" if draw else "json"}, DetectResult)


def classify(image: Image, parameters: ClassifyParameters) -> Call[ClassifyResult]:
    """Make the request for the classes of one image."""
    return _single("/classify", image, parameters, ClassifyResult)


def batches(images: Iterable[Image], parameters: DetectParameters) -> Iterator[Call[list[DetectResult | Problem]]]:
    """Make the requests for the objects in images, as many in each as the gateway takes."""
    return (_batch(group, parameters) for group in _groups(images))


def _groups(images: Iterable[Image]) -> Iterator[list[Image]]:
    left = iter(images)
    while group := [*islice(left, MAX_BATCH)]:
        yield group


def ocr(image: Image, parameters: OcrParameters) -> Call[OcrResult]:
    """Make the request for the text in one image."""
    return _single("/ocr/predict", image, parameters, OcrResult)


def faces(image: Image, parameters: FaceParameters, *, describe: bool) -> Call[FacesResult]:
    """Make the request for the faces in one image, or also for their vectors."""
    return _single("/faces/recognize" if describe else "/faces/detect", image, parameters, FacesResult)


def verify(images: tuple[Image, Image], parameters: VerifyParameters) -> Call[VerifyResult]:
    """Make the request for the comparison of the largest faces in two images."""
    loaded = [_load(image, parameters)[0] for image in images]
    files = {f"image{number}": _part(*one) for number, one in enumerate(zip(images, loaded, strict=True), 1)}
    return Call("/faces/verify", {"params": _query(parameters), "files": files}, partial(_read, VerifyResult))


def embed(image: Image, parameters: EmbedParameters) -> Call[EmbedResult]:
    """Make the request for the vector that describes one image."""
    return _single("/embed/image", image, parameters, EmbedResult)


def embed_batches(images: Iterable[Image], parameters: EmbedParameters) -> Iterator[Call[list[Vector | Problem]]]:
    """Make the requests for the vectors that describe images, as many in each as the gateway takes."""
    for group in _groups(images):
        files = [("images", _part(image, _load(image, parameters)[0])) for image in group]
        yield Call("/embed/batch", {"params": _query(parameters), "files": files}, _read_vectors)


def _read_vectors(response: httpx.Response) -> list[Vector | Problem]:
    results = _decode(response, _Vectors).results
    return [
        Problem(one.problem.status, one.problem) if one.problem else msgspec.convert(one, Vector, from_attributes=True)
        for one in results
    ]


def embed_boxes(image: Image, boxes: Sequence[Sequence[float]], parameters: EmbedParameters) -> Call[EmbedBoxesResult]:
    """Make the request for the vectors that describe parts of one image."""
    data, shrunk = _load(image, parameters)
    options = {
        "params": _query(parameters),
        "files": {"image": _part(image, data)},
        "data": {"boxes": json.dumps([*map(list, boxes)])},
    }
    return Call("/embed/boxes", options, lambda response: _restore(_read(EmbedBoxesResult, response), shrunk, parameters))


def predict(name: str, image: Image, parameters: DetectParameters) -> Call[PredictResult]:
    """Make the request for what a model, or a cascade, finds in one image."""
    call = _single(f"/predict/{quote(name, safe='')}", image, parameters, PredictResult)
    return Call(call.path, call.options, lambda response: _add_steps(call.read(response), response))


def _add_steps(result: PredictResult, response: httpx.Response) -> PredictResult:
    """Add what the later steps of a cascade say, which is in fields that are named as they are."""
    document = msgspec.json.decode(response.content)
    steps = [_without(Detection, one) for one in document["detections"]]
    return msgspec.structs.replace(result, steps=steps, image_steps=_without(PredictResult, document))


def _without(kind: type[msgspec.Struct], fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if name not in {*kind.__struct_fields__, *_OTHER_FIELDS}}


def analyze(image: Image, parameters: AnalyzeParameters) -> Call[Analysis]:
    """Make the request for all that is found in one image."""
    return _single("/analyze", image, parameters, Analysis)


def ingest(image: Image, metadata: Mapping[str, Any] | None, parameters: IngestParameters) -> Call[IngestResult]:
    """Make the request that adds an image to the index, once if it is repeated."""
    if parameters.get("skip_duplicates") is False and "image_id" not in parameters:
        parameters = {**parameters, "image_id": str(uuid4())}
    options: dict[str, Any] = {"params": _query(parameters), "files": {"image": _part(image, _load(image, parameters)[0])}}
    if metadata is not None:
        options["data"] = {"metadata": json.dumps(metadata)}
    return Call("/ingest", options, partial(_read, IngestResult))


def search_image(image: Image, parameters: SearchParameters) -> Call[SearchResult]:
    """Make the request for images like one."""
    return _single("/search/image", image, parameters, SearchResult)


def search_faces(image: Image, parameters: SearchParameters) -> Call[SearchResult]:
    """Make the request for faces like the most certain one in an image."""
    return _single("/faces/search", image, parameters, SearchResult)


def search_text(text: str, parameters: SearchParameters) -> Call[SearchResult]:
    """Make the request for images with these words in them."""
    return Call("/search/ocr", {"params": {**parameters, "text": text}}, partial(_read, SearchResult))


def delete_image(image_id: str) -> Call[DeleteResult]:
    """Make the request that deletes an image from the index."""
    return Call(f"/query/image/{quote(image_id, safe='')}", {}, partial(_decode, kind=DeleteResult), "DELETE", DeleteResult([], 0))


def _single(path: str, image: Image, parameters: Mapping[str, Any], kind: type[A]) -> Call[A]:
    query, data, shrunk = _query(parameters), *_load(image, parameters)
    if _is_address(image):
        options: dict[str, Any] = {"params": {**query, "url": image}}
    else:
        options = {"params": query, "content": data, "headers": {"Content-Type": "application/octet-stream"}}
    return Call(path, options, lambda response: _restore(_read(kind, response), shrunk, parameters))


def _read(kind: type[A], response: httpx.Response) -> A:
    timings = {stage: float(duration) for stage, duration in _STAGE.findall(response.headers.get("Server-Timing", ""))}
    return msgspec.structs.replace(_decode(response, kind), timings=timings)


def _batch(images: list[Image], parameters: DetectParameters) -> Call[list[DetectResult | Problem]]:
    loaded = [_load(image, parameters) for image in images]
    files = [("images", _part(image, data)) for image, (data, _) in zip(images, loaded, strict=True)]

    def read(response: httpx.Response) -> list[DetectResult | Problem]:
        batch = _decode(response, _Batch)
        found = {failure.index: Problem(failure.problem.status, failure.problem) for failure in batch.failures or ()}
        results = {result.image_index: batch.result(result) for result in batch.results}
        return [
            _restore(results[index], shrunk, parameters) if index in results else found[index]
            for index, (_, shrunk) in enumerate(loaded)
        ]

    return Call(f"{_route(parameters)}/batch", {"params": _query(parameters), "files": files}, read)


def _route(parameters: DetectParameters) -> str:
    return f"/{parameters.get('task', 'detect')}"


def _query(parameters: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in parameters.items() if name not in {"prepare", "task"}}


def _is_address(image: Image) -> TypeGuard[str]:
    return isinstance(image, str) and image.startswith("https://")


def _load(image: Image, parameters: Mapping[str, Any]) -> tuple[bytes, Shrunk | None]:
    """Return what is sent of an image."""
    if _is_address(image):
        return image.encode(), None
    data = image if isinstance(image, bytes) else Path(image).read_bytes()
    prepare = parameters.get("prepare")
    if prepare and parameters.get("masks") in {"rle", "png"}:
        raise ValueError("with prepare, masks are polygons")
    shrunk = shrink(data, prepare) if prepare else None
    return shrunk.data if shrunk else data, shrunk


def _part(image: Image, data: bytes) -> tuple[str | None, bytes]:
    """Return the file name, None for an address, and the content of a part of a form."""
    return None if _is_address(image) else "image", data


def _restore(result: A, shrunk: Shrunk | None, parameters: Mapping[str, Any]) -> A:
    """Make a result that of the original image."""
    if shrunk is None or not isinstance(result, ImageAnswer):
        return result
    return result.of_original(shrunk.upright(result.image), in_pixels=parameters.get("boxes") == "pixel")


class _BatchResult(msgspec.Struct):
    image_index: int
    image: ImageSize
    detections: list[Detection]


class _BatchFailure(msgspec.Struct):
    index: int
    problem: ProblemDocument


class _Batch(msgspec.Struct):
    """The response to a batch."""

    results: list[_BatchResult]
    failures: list[_BatchFailure] | None
    model: ModelUsed | None
    total_time_ms: float
    request_id: str

    def result(self, found: _BatchResult) -> DetectResult:
        assert self.model  # noqa: S101 - any result has one
        return DetectResult(
            image=found.image,
            model=self.model,
            total_time_ms=self.total_time_ms,
            request_id=self.request_id,
            detections=found.detections,
        )


class _VectorResult(msgspec.Struct):
    embedding: list[float] | None = None
    embedding_norm: float | None = None
    model: ModelUsed | None = None
    problem: ProblemDocument | None = None


class _Vectors(msgspec.Struct):
    """The response to a batch of images that are described."""

    results: list[_VectorResult]


def _decode(response: httpx.Response, kind: type[T]) -> T:
    if not response.is_success:
        try:
            document = msgspec.json.decode(response.content, type=ProblemDocument)
        except ValueError:  # of msgspec: the body is a proxy's
            document = ProblemDocument(detail=response.reason_phrase, request_id=response.headers.get("X-Request-ID", ""))
        retry_after = response.headers.get("Retry-After", "")  # a proxy may send a date instead of seconds
        raise Problem(response.status_code, document, float(retry_after) if retry_after.isdecimal() else None)
    try:
        return msgspec.json.decode(response.content, type=kind)
    except ValueError as error:  # of msgspec
        raise UnexpectedResponse(f"{address(response.url)} does not respond as a gateway: {error}") from error
