"""The dialect of the Ultralytics Platform: its dedicated endpoints and its shared endpoint.

Source: docs/en/platform/deploy/inference.md, endpoints.md and docs/en/platform/api/index.md of ultralytics/ultralytics.
"""

import platform
from typing import Annotated

import msgspec
from litestar.di import NamedDependency
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from litestar.types import HTTPScope
from msgspec import Meta

from app import __version__
from app.api.answering.format import ResponseInput
from app.api.answering.native import to_scores
from app.api.answering.responses import JsonResponse
from app.api.context import context_of
from app.api.dependencies import WorkerResources
from app.api.dialects.detection import detect
from app.api.dialects.dialect import AnyRequest, Dialect, DialectParameters
from app.api.parameters.parse import Pairs
from app.api.receiving.body import FILE_FIELDS, ParsedBody, parse_body
from app.api.receiving.content_type import JSON, media_type
from app.api.routes import ModelRoute
from app.errors import UnsupportedMediaType
from app.pipeline.call import MAX_DETECTIONS, Detections, DetectOptions
from app.telemetry.timing import Timing

_IOU = 0.7
_FIELDS = (*FILE_FIELDS, "source")


class _Parameters(DialectParameters, frozen=True, kw_only=True):
    """Parameters of the platform, with slightly wider ranges; there, `conf` starts at 0.01 and `iou` ends at 0.95."""

    url: str | None = None
    """The URL of the image, which `source` may contain."""
    conf: Annotated[float, Meta(ge=0, le=1)] = 0.25
    iou: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Default: 0.7."""
    imgsz: Annotated[int, Meta(ge=32, le=1280)] | None = None
    """Ignored: models have a fixed input size."""
    normalize: bool = False
    decimals: Annotated[int, Meta(ge=0, le=10)] = 5

    @property
    def options(self) -> DetectOptions:
        """The options of the detection."""
        return DetectOptions(
            self.model, self.conf, None, MAX_DETECTIONS, self.iou, version=self.version, lowers_iou=True, default_iou=_IOU
        )


class Box(msgspec.Struct, frozen=True):
    """Corners, in pixels or as fractions of the upright image."""

    x1: float
    y1: float
    x2: float
    y2: float


class Result(msgspec.Struct, frozen=True):
    """One object."""

    class_: int = msgspec.field(name="class")
    name: str
    confidence: float
    box: Box


class Speed(msgspec.Struct, frozen=True):
    """Durations of the steps, in milliseconds."""

    preprocess: float
    inference: float
    postprocess: float


class ImageResults(msgspec.Struct, frozen=True):
    """The objects of one image, by descending confidence."""

    shape: tuple[int, int]
    """Height and width of the upright image, in pixels."""
    results: list[Result]
    speed: Speed


class Metadata(msgspec.Struct, frozen=True, rename="camel"):
    """Model and programs that produced the response."""

    image_count: int
    function_time_call: float
    """Seconds since the request arrived."""
    model: str
    version: dict[str, str]
    """Versions of the programs and of the model."""


class Prediction(msgspec.Struct, frozen=True):
    """The response."""

    images: list[ImageResults]
    metadata: Metadata


@ModelRoute("/predict", key_in="query")
async def predict(request: AnyRequest, worker: NamedDependency[WorkerResources]) -> ASGIResponse:
    """Detect objects with the default model; stands in for a dedicated endpoint."""
    return await _detect(request, worker)


@ModelRoute("/api/models/{model:str}/predict", key_in="query")
async def predict_with(request: AnyRequest, worker: NamedDependency[WorkerResources], model: FromPath[str]) -> ASGIResponse:
    """Detect objects with the model in the path."""
    return await _detect(request, worker, [("model", model)])


async def _detect(request: AnyRequest, worker: WorkerResources, in_path: Pairs = ()) -> ASGIResponse:
    return await detect(request, worker, _Parameters, _parse, _respond, in_path)


def _parse(data: bytes, content_type: str, kind: type[_Parameters]) -> ParsedBody:
    if media_type(content_type) == JSON:
        raise UnsupportedMediaType("send a form with the image in the field 'file', or its address in 'source'")
    return parse_body(data, content_type, kind, _FIELDS)


async def _respond(given: ResponseInput[Detections], wanted: _Parameters) -> JsonResponse:
    return JsonResponse(msgspec.json.encode(to_prediction(given.found, given.context.timing, wanted)))


def to_prediction(found: Detections, timing: Timing, wanted: _Parameters) -> Prediction:
    """Convert the detections in an image."""
    boxes = found.boxes.astype(float)
    if wanted.normalize:
        boxes /= (found.width, found.height) * 2
    results = [
        Result(id_, found.spec.class_name(id_), score, Box(*box))
        for id_, score, box in zip(
            found.class_ids.tolist(), to_scores(found.scores), boxes.round(wanted.decimals).tolist(), strict=True
        )
    ]
    speed = Speed(*(round(timing.stages.get(stage, 0), 2) for stage in ("decode", "infer", "post")))
    version = {"nereid": __version__, "python": platform.python_version(), "model": found.version}
    metadata = Metadata(1, round(timing.total / 1e3, 5), found.spec.name, version)
    return Prediction([ImageResults((found.height, found.width), results, speed)], metadata)


def _is_not_json(scope: HTTPScope) -> bool:
    """Return whether a request is for this dialect: another dialect takes JSON at the same path."""
    return media_type(context_of(scope).content_type) != JSON


DIALECT = Dialect("ultralytics", [predict, predict_with], statuses={415: 400, 422: 400}, applies={"/predict": _is_not_json})
