"""The dialect of the Ultralytics Platform, its dedicated endpoints and its shared endpoint, and of Ultralytics HUB's `hub-sdk`.

Source: docs/en/platform/deploy/inference.md, endpoints.md and docs/en/platform/api/index.md of ultralytics/ultralytics;
hub_sdk/base/auth.py, base/server_clients.py and modules/models.py of ultralytics/hub-sdk.
"""

import platform
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import repeat
from typing import Annotated, Any

import msgspec
import numpy as np
from litestar import get, post
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from msgspec import Meta
from numpy.typing import NDArray

from app import __version__
from app.api.answering.format import ResponseInput
from app.api.answering.native import objects, rounded, to_scores
from app.api.caller.check import require_key
from app.api.context import AnyRequest, context_of
from app.api.dependencies import Worker, WorkerPipeline
from app.api.detect import handle_image
from app.api.dialects.dialect import Dialect, DialectParameters, OptionsByModel, by_json
from app.api.parameters.parse import Fraction
from app.api.receiving.body import FILE_FIELDS, parse_body
from app.api.receiving.content_type import JSON, media_type
from app.api.reports.models import describe_model
from app.api.routes import ModelRoute
from app.model.heads import ClassificationHead
from app.model.reference import split_reference
from app.model.spec import ModelSpec
from app.pipeline.call import MAX_DETECTIONS, DetectOptions, Reader, TaskOptions
from app.pipeline.results import Classifications, Detections

# Of `Results.obb.xyxyxyxy`: bottom right, top right, top left and bottom left, if the box is not turned.
_CORNERS = (2, 1, 0, 3)
_parse = partial(parse_body, fields=(*FILE_FIELDS, "source"))


class _Options(OptionsByModel):
    __slots__ = ()

    def reader(self, spec: ModelSpec) -> Reader[Classifications | Detections]:  # type: ignore[override]  # the answer is only described
        if isinstance(spec.head, ClassificationHead):
            return TaskOptions[Classifications]("classification", self.model, top_k=5).reader(spec)
        return super().reader(spec)


class _Parameters(DialectParameters, frozen=True, kw_only=True):
    url: str | None = None
    confidence: Fraction = msgspec.field(default=0.25, name="conf")
    iou: Fraction | None = None
    imgsz: Annotated[int, Meta(ge=32, le=1280)] | None = None
    """Ignored: models have a fixed input size."""
    normalize: bool = False
    decimals: Annotated[int, Meta(ge=0, le=10)] = 5

    @property
    def options(self) -> DetectOptions:
        limit, version = MAX_DETECTIONS, self.version
        return _Options(self.model, self.confidence, None, limit, self.iou, version=version, lowers_iou=True, default_iou=0.7)


@ModelRoute(["/predict", "/api/models/{model:str}/predict", "/v1/predict/{model:str}"], key_in="query", has_streams=True)
async def predict(
    request: AnyRequest, worker: Worker, pipeline: WorkerPipeline, model: FromPath[str | None] = None
) -> ASGIResponse:
    """Ask the model in the path; without one, the default model, as a dedicated endpoint asks its own."""
    in_path = [("model", model)] if model else []
    return await handle_image(request, worker, pipeline, _Parameters, in_path, parse=_parse, respond=by_json(to_prediction))


@post("/v1/auth", status_code=200)
async def authenticate(request: AnyRequest, worker: Worker) -> dict[str, bool]:
    """Tell hub-sdk that its key is valid; without this answer, it would not send the key again."""
    require_key(request, worker.keys, "detect", is_dialect=True)
    return {"success": True}


@get("/v1/models/{model:str}")
async def describe(
    request: AnyRequest, worker: Worker, pipeline: WorkerPipeline, model: FromPath[str]
) -> dict[str, dict[str, str]]:
    """Tell hub-sdk that a model, or a route, exists."""
    require_key(request, worker.keys, "detect", is_dialect=True)
    await describe_model(split_reference(pipeline.refer_to(model, None))[0], pipeline)
    return {"data": {"id": model}}


def to_prediction(given: ResponseInput[Classifications | Detections]) -> dict[str, Any]:
    """Describe the result for an image; `shape` is height and width, `speed` in milliseconds, `functionTimeCall` in seconds."""
    found, timing, wanted = given.found, given.context.timing, given.wanted
    if isinstance(found, Classifications):
        results = [
            {"class": id_, "name": found.spec.class_name(id_), "confidence": score}
            for id_, score in zip(found.class_ids.tolist(), to_scores(found.scores), strict=True)
        ]
    else:
        results = _describe_objects(found, wanted.decimals, is_normalized=wanted.normalize)
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


def _describe_objects(found: Detections, decimals: int, *, is_normalized: bool) -> list[dict[str, Any]]:
    size = np.array([found.width, found.height] if is_normalized else [1, 1], np.float64)
    return [
        {"class": id_, "name": name, "confidence": score, "box": {"x1": x1, "y1": y1, "x2": x2, "y2": y2}, **shape}
        for ((x1, y1, x2, y2), score, id_, name), shape in zip(
            objects(found, "normalized" if is_normalized else "pixel", decimals), _shapes(found, size, decimals), strict=False
        )
    ]


def _shapes(found: Detections, size: NDArray[np.float64], decimals: int) -> Iterator[dict[str, Any]]:
    if found.masks is not None:
        for mask in found.masks:
            yield {"segments": _by_axis(_join(mask.parts) / size, decimals)}
    elif found.keypoints is not None:
        for own in found.keypoints:
            visible = {"visible": rounded(own[:, 2], decimals)} if own.shape[1] > 2 else {}  # noqa: PLR2004 - x and y
            yield {"keypoints": _by_axis(own[:, :2] / size, decimals) | visible}
    elif found.corners is not None:
        for corners in rounded(found.corners[:, _CORNERS] / size, decimals):
            points = zip(("1", "2", "3", "4"), corners, strict=True)
            yield {"box": {axis + number: at for number, point in points for axis, at in zip("xy", point, strict=True)}}
    else:
        yield from repeat({})


def _by_axis(points: NDArray[np.float64], decimals: int) -> dict[str, list[float]]:
    return {"x": rounded(points[:, 0], decimals), "y": rounded(points[:, 1], decimals)}


def _join(parts: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """Join the parts of a mask into one path (m, 2), which goes from the first vertex of the first part to each other and back."""
    if not parts:
        return np.zeros((0, 2), np.float32)
    first, *others = parts
    return np.concatenate([first, *(piece for part in others for piece in (first[:1], part, part[:1]))])


_BELOW_ITS_NAME = ("/v1/auth", "/v1/models/{model:str}", "/v1/predict/{model:str}")
"""Two of these are the gateway's own paths, too. So hub-sdk's address ends with the dialect's name."""
DIALECT = Dialect(
    "ultralytics",
    [predict, authenticate, describe],
    statuses={415: 400, 422: 400},
    applies={
        "/predict": lambda scope: media_type(context_of(scope).content_type) != JSON,  # with JSON it was for Label Studio
        **dict.fromkeys(_BELOW_ITS_NAME, lambda _: False),
    },
)
