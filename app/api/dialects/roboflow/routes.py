"""The routes of Roboflow, and their responses."""

import re
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from litestar.types import HTTPScope
from msgspec import UNSET, Meta

from app.api.answering import drawn
from app.api.answering.format import ResponseInput
from app.api.answering.responses import JsonResponse
from app.api.answering.schema import Problem
from app.api.context import context_of
from app.api.dependencies import WorkerResources
from app.api.dialects.detection import detect, detect_each, receive_text, require_all
from app.api.dialects.detectors import detectors, find_detector
from app.api.dialects.dialect import AnyRequest, Dialect, DialectParameters
from app.api.dialects.roboflow.answers import Inference, ModelDescriptions, to_description, to_inference
from app.api.dialects.roboflow.body import InferenceBody, parse_members, parse_v0
from app.api.parameters.parse import check_model_name, split_classes
from app.api.receiving.body import ParsedBody
from app.api.routes import ModelRoute
from app.errors import UnknownModel
from app.pipeline.call import MAX_DETECTIONS, CallContext, Detections, DetectOptions

_CONFIDENCE = 0.4
_IOU = 0.3
_MODEL_ID = re.compile(r"([^/]*)(?:/([1-9][0-9]{0,17}))?")
_V0 = "/{model:str}/{version:int}"

Usual = Literal["best", "default"]
"""Names of thresholds that Roboflow tunes per model; here they select the default threshold."""


class _ModelParameters(DialectParameters, frozen=True, kw_only=True):
    model_id: str | None = None
    """Name of a model, or `NAME/VERSION`."""

    def __post_init__(self) -> None:
        """Check the id; raise UnknownModel if no model can have it."""
        super().__post_init__()
        if self.model_id is not None:
            check_model_name(self.reference[0] or "")

    @property
    def reference(self) -> tuple[str | None, int | None]:
        """Name and version of the model; None for the default model, and for the newest version."""
        if self.model_id is None:
            return self.model, self.version
        found = _MODEL_ID.fullmatch(self.model_id)
        if found is None:
            raise UnknownModel("a model_id is the name of a model, or NAME/VERSION, whose version is a whole number")
        return found[1], int(found[2]) if found[2] else self.version


class _V1Parameters(_ModelParameters, frozen=True, kw_only=True):
    confidence: Annotated[float, Meta(ge=0, le=1)] | Usual = _CONFIDENCE
    iou_threshold: Annotated[float, Meta(ge=0, le=1)] | None = None
    class_filter: str | None = None
    class_agnostic_nms: bool = False
    max_detections: Annotated[int, Meta(ge=1, le=2**63 - 1)] = MAX_DETECTIONS
    url: str | None = None
    """The URL of the image."""

    @property
    def options(self) -> DetectOptions:
        """The options of the detection."""
        return _options(
            self.reference, self.confidence, split_classes(self.class_filter), self.max_detections, self.iou_threshold
        )._replace(agnostic=self.class_agnostic_nms)


class _V0Parameters(DialectParameters, frozen=True, kw_only=True):
    confidence: Annotated[float, Meta(ge=0, le=100)] | Usual = _CONFIDENCE
    """A fraction below 1, otherwise a percentage."""
    overlap: Annotated[float, Meta(ge=0, le=100)] | None = None
    """A fraction below 1, otherwise a percentage."""
    classes: str | None = None
    max_detections: Annotated[int, Meta(ge=1, le=2**63 - 1)] = MAX_DETECTIONS
    format: str = "json"
    image: str | None = None
    """The URL of the image."""

    @property
    def address(self) -> str | None:
        """The URL of the image; None if the body contains the image."""
        return self.image or None

    @property
    def options(self) -> DetectOptions:
        """The options of the detection."""
        confidence = self.confidence if isinstance(self.confidence, str) else _to_fraction(self.confidence)
        iou = None if self.overlap is None else _to_fraction(self.overlap)
        return _options((self.model, self.version), confidence, split_classes(self.classes), self.max_detections, iou)


@get("/model/registry")
async def list_models(request: AnyRequest, worker: NamedDependency[WorkerResources]) -> ModelDescriptions:
    """List the detectors, each in its newest version."""
    return ModelDescriptions([to_description(spec) for spec in await detectors(request, worker)])


@ModelRoute("/model/add", takes="text", key_in="body")
async def add_model(request: AnyRequest, worker: NamedDependency[WorkerResources]) -> ModelDescriptions:
    """List the detectors; the requested one comes first, under the client's id for it."""
    received = await receive_text(request, worker, _ModelParameters, lambda data, *_: ParsedBody(b"", parse_members(data)[1]))
    wanted = received.wanted
    spec = await find_detector(worker, *wanted.reference, received.call)
    others = await detectors(request, worker)
    return ModelDescriptions([to_description(spec, wanted.model_id), *map(to_description, others)])


@ModelRoute("/infer/object_detection", task=None, takes="images", key_in="body")
async def infer(request: AnyRequest, worker: NamedDependency[WorkerResources]) -> ASGIResponse:
    """Detect objects in an image, or in each of a list of images. If one image fails, the request fails."""
    body = InferenceBody()
    context = context_of(request.scope)

    async def respond(results: list[Detections | Exception], _: _V1Parameters, call: CallContext) -> ASGIResponse:
        found = require_all(results)

        def describe(pictures: Sequence[bytes] = ()) -> Inference | list[Inference]:
            ids = [f"{context.request_id}-{index}" for index in range(len(found))] if body.is_list else [context.request_id]
            described = [
                to_inference(one, id_, context.timing.total, pictures[index] if pictures else UNSET)
                for index, (one, id_) in enumerate(zip(found, ids, strict=True))
            ]
            return described if body.is_list else described[0]

        if body.is_list or body.drawn:  # large responses
            drawable = list(zip(body.drawn, found, strict=False))  # none if no pictures are wanted
            return await drawn.respond_with_pictures(worker.pipeline, call, drawable, describe)
        return JsonResponse(msgspec.json.encode(describe()))

    return await detect_each(request, worker, _V1Parameters, body.parse, respond)


@ModelRoute(_V0, key_in="query")
async def infer_v0(
    request: AnyRequest, worker: NamedDependency[WorkerResources], model: FromPath[str], version: FromPath[int]
) -> ASGIResponse:
    """Detect objects with the model in the path."""

    async def respond(given: ResponseInput[Detections], wanted: _V0Parameters) -> ASGIResponse:
        def describe(pictures: Sequence[bytes] = ()) -> Inference:
            picture = pictures[0] if pictures else UNSET
            return to_inference(given.found, given.context.request_id, given.context.timing.total, picture)

        match wanted.format:
            case "image":
                return await drawn.IMAGE.respond(given)
            case "image_and_json":
                return await drawn.respond_with_pictures(given.pipeline, given.call, [(given.image, given.found)], describe)
            case _:
                return JsonResponse(msgspec.json.encode(describe()))

    return await detect(request, worker, _V0Parameters, parse_v0, respond, [("model", model), ("version", str(version))])


def write_error(problem: Problem) -> dict[str, Any]:
    """Convert a problem to Roboflow's error format."""
    return {"status": problem.status, "message": problem.detail}


def _options(
    reference: tuple[str | None, int | None], confidence: float | Usual, classes: list[str] | None, most: int, iou: float | None
) -> DetectOptions:
    """Make options with the defaults of Roboflow's server. The default IoU applies only to models that need suppression."""
    model, version = reference
    return DetectOptions(
        model,
        _CONFIDENCE if isinstance(confidence, str) else confidence,
        classes,
        min(most, MAX_DETECTIONS),
        iou,
        version=version,
        lowers_iou=True,
        default_iou=_IOU,
    )


def _to_fraction(number: float) -> float:
    """Convert a fraction or a percentage to a fraction: 1 is one percent."""
    return number / 100 if number >= 1 else number


def _is_v0(scope: HTTPScope) -> bool:
    """Return whether a request is for this dialect, not for the gateway's own `/predict/{model}`."""
    return scope["method"] == "POST" and not scope["path"].startswith("/predict/")


DIALECT = Dialect("roboflow", [list_models, add_model, infer, infer_v0], write_error, applies={_V0: _is_v0})
