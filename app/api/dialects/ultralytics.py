"""The dialect of the Ultralytics Platform: its dedicated endpoints and its shared endpoint.

Source: docs/en/platform/deploy/inference.md, endpoints.md and docs/en/platform/api/index.md of ultralytics/ultralytics.
"""

import platform
from typing import Annotated, Any

import msgspec
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from litestar.types import HTTPScope
from msgspec import Meta

from app import __version__
from app.api.answering.format import ResponseInput
from app.api.answering.native import objects
from app.api.context import context_of
from app.api.dependencies import Worker, WorkerResources
from app.api.dialects.dialect import AnyRequest, ConfidenceParameters, Dialect, Fraction, detect
from app.api.parameters.parse import Pairs
from app.api.receiving.body import FILE_FIELDS, ParsedBody, parse_body
from app.api.receiving.content_type import JSON, media_type
from app.api.routes import ModelRoute
from app.errors import UnsupportedMediaType
from app.pipeline.call import Detections, DetectOptions

_IOU = 0.7
_FIELDS = (*FILE_FIELDS, "source")


class _Parameters(ConfidenceParameters, frozen=True, kw_only=True):
    """Parameters of the platform, with slightly wider ranges; there, `conf` starts at 0.01 and `iou` ends at 0.95."""

    url: str | None = None
    """The URL of the image, which `source` may contain."""
    confidence: Fraction = msgspec.field(default=0.25, name="conf")
    iou: Fraction | None = None
    """Default: 0.7."""
    imgsz: Annotated[int, Meta(ge=32, le=1280)] | None = None
    """Ignored: models have a fixed input size."""
    normalize: bool = False
    decimals: Annotated[int, Meta(ge=0, le=10)] = 5

    @property
    def options(self) -> DetectOptions:
        """The options of the detection."""
        return super().options._replace(iou=self.iou, lowers_iou=True, default_iou=_IOU)


@ModelRoute("/predict", key_in="query")
async def predict(request: AnyRequest, worker: Worker) -> ASGIResponse:
    """Detect objects with the default model; stands in for a dedicated endpoint."""
    return await _detect(request, worker)


@ModelRoute("/api/models/{model:str}/predict", key_in="query")
async def predict_with(request: AnyRequest, worker: Worker, model: FromPath[str]) -> ASGIResponse:
    """Detect objects with the model in the path."""
    return await _detect(request, worker, [("model", model)])


async def _detect(request: AnyRequest, worker: WorkerResources, in_path: Pairs = ()) -> ASGIResponse:
    return await detect(request, worker, _Parameters, _parse, to_prediction, in_path)


def _parse(data: bytes, content_type: str, kind: type[_Parameters]) -> ParsedBody:
    if media_type(content_type) == JSON:
        raise UnsupportedMediaType("send a form with the image in the field 'file', or its address in 'source'")
    return parse_body(data, content_type, kind, _FIELDS)


def to_prediction(given: ResponseInput[Detections]) -> dict[str, Any]:
    """Convert the detections in an image, by descending confidence.

    Corners in pixels or as fractions of the upright image, `shape` is its height and width; `speed` in milliseconds,
    `functionTimeCall` in seconds since the request arrived.
    """
    found, timing, wanted = given.found, given.context.timing, given.wanted
    results = [
        {"class": id_, "name": name, "confidence": score, "box": {"x1": x1, "y1": y1, "x2": x2, "y2": y2}}
        for (x1, y1, x2, y2), score, id_, name in objects(found, "normalized" if wanted.normalize else "pixel", wanted.decimals)
    ]
    stages = {"preprocess": "decode", "inference": "infer", "postprocess": "post"}
    speed = {name: round(timing.stages.get(stage, 0), 2) for name, stage in stages.items()}
    return {
        "images": [{"shape": (found.height, found.width), "results": results, "speed": speed}],
        "metadata": {
            "imageCount": 1,
            "functionTimeCall": round(timing.total / 1e3, 5),
            "model": found.spec.name,
            "version": {"nereid": __version__, "python": platform.python_version(), "model": found.version},
        },
    }


def _is_not_json(scope: HTTPScope) -> bool:
    """Return whether a request is for this dialect: another dialect takes JSON at the same path."""
    return media_type(context_of(scope).content_type) != JSON


DIALECT = Dialect("ultralytics", [predict, predict_with], statuses={415: 400, 422: 400}, applies={"/predict": _is_not_json})
