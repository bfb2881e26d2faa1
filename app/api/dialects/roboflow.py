"""The dialect of Roboflow: its inference server (v1) and its hosted API (v0), both used by `inference-sdk`.

Source: roboflow/inference, inference/core/interfaces/http/http_api.py, inference/core/entities/, inference_sdk/http/client.py.
"""

import re
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import Annotated, Any, ClassVar, Literal

import msgspec
from litestar import get
from litestar.handlers import HTTPRouteHandler
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from msgspec import Meta

from app.api.answering import drawn
from app.api.answering.format import ResponseInput
from app.api.answering.native import respond_json
from app.api.batch.answer import ImagesAnswer
from app.api.context import AnyRequest, context_of
from app.api.dependencies import Worker, WorkerPipeline
from app.api.detect import handle_image
from app.api.dialects import roboflow_core
from app.api.dialects.dialect import (
    Dialect,
    DialectParameters,
    OptionsByModel,
    answer_each,
    detectors,
)
from app.api.dialects.roboflow_answers import TASK_TYPES, to_description, to_inference
from app.api.dialects.roboflow_images import EXAMPLE, InferenceBody
from app.api.parameters.parse import Fraction, check_model_name, split_classes
from app.api.receiving.body import ParsedBody, decode_base64, parse_document, parse_multipart
from app.api.receiving.content_type import JSON, MULTIPART, URLENCODED, media_type
from app.api.receiving.intake import Receiving
from app.api.routes import ModelRoute
from app.errors import UnknownModel
from app.model.heads import Task
from app.pipeline.call import MAX_DETECTIONS, CallContext
from app.pipeline.results import Detections


class _Options(OptionsByModel):
    __slots__ = ()
    tasks = TASK_TYPES


_DEFAULTS = _Options(None, 0.4, None, MAX_DETECTIONS, lowers_iou=True, default_iou=0.3, drops_unknown=True)
"""Those of Roboflow's server. The IoU applies only to models that need suppression."""
_MODEL_ID = re.compile(r"([^/]*)(?:/([1-9][0-9]{0,17}))?")
_V0 = "/{model:str}/{version:int}"

Usual = Literal["best", "default"]


class _ModelParameters(DialectParameters, frozen=True, kw_only=True):
    task: ClassVar[Task] = "detection"
    model_id: str | None = None

    def __post_init__(self) -> None:
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

    @property
    def options(self) -> _Options:
        model, version = self.reference
        return _DEFAULTS._replace(model=model, version=version, task=self.task)


class _V1Parameters(_ModelParameters, frozen=True, kw_only=True):
    repeatable = frozenset({"class_filter"})
    confidence: Fraction | Usual = _DEFAULTS.confidence
    keypoint_confidence: Fraction = 0.0
    iou_threshold: Fraction | None = None
    class_filter: str | list[str] | None = None
    class_agnostic_nms: bool = False
    max_detections: Annotated[int, Meta(ge=1, le=2**63 - 1)] = MAX_DETECTIONS
    visualize_predictions: bool = False
    url: str | None = None

    @property
    def options(self) -> _Options:
        return super().options._replace(
            confidence=_to_number(self.confidence),
            classes=split_classes(self.class_filter) or None,  # some clients without a filter send an empty one
            max_detections=min(self.max_detections, MAX_DETECTIONS),
            iou=self.iou_threshold,
            agnostic=self.class_agnostic_nms,
        )


class _V0Parameters(DialectParameters, frozen=True, kw_only=True):
    confidence: Annotated[float, Meta(ge=0, le=100)] | Usual = _DEFAULTS.confidence
    """A fraction below 1, otherwise a percentage."""
    keypoint_confidence: Fraction = 0.0
    overlap: Annotated[float, Meta(ge=0, le=100)] | None = None
    classes: str | None = None
    max_detections: Annotated[int, Meta(ge=1, le=2**63 - 1)] = MAX_DETECTIONS
    format: str = "json"
    url: str | None = msgspec.field(default=None, name="image")

    @property
    def options(self) -> _Options:
        return _DEFAULTS._replace(
            model=self.model,
            version=self.version,
            confidence=_to_fraction(_to_number(self.confidence)),
            classes=split_classes(self.classes) or None,
            max_detections=min(self.max_detections, MAX_DETECTIONS),
            iou=None if self.overlap is None else _to_fraction(self.overlap),
        )


def parse_v0(data: bytes, content_type: str, _: type[_V0Parameters]) -> ParsedBody:
    """Parse a body that is an image: the field `file` of a form, the encoded image, or base64 declared as JSON or URL-encoded."""
    declared = media_type(content_type)
    if declared == MULTIPART:
        parsed = parse_multipart(data, content_type)
        return parsed._replace(parameters=[("image" if name == "url" else name, value) for name, value in parsed.parameters])
    if declared in {JSON, URLENCODED} and data.isascii():
        return ParsedBody(decode_base64(data.decode()), [])
    return ParsedBody(data, [])


@get("/model/registry")
async def list_models(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> dict[str, Any]:
    """List the detectors, each in its newest version."""
    return {"models": [to_description(spec) for spec in await detectors(request, worker, pipeline, TASK_TYPES)]}


@ModelRoute("/model/add", takes="text", key_in="body")
async def add_model(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> dict[str, Any]:
    """List the detectors, the requested one first, under the client's id for it."""

    def parse(data: bytes, _: str, kind: type[_ModelParameters]) -> ParsedBody:
        return ParsedBody(b"", parse_document(data, "image", kind, f"expected a JSON object such as {EXAMPLE}")[1])

    async with Receiving(request, worker, _ModelParameters, parse, may_be_empty=True) as (_, _, wanted, call):
        options = wanted.options
        model = pipeline.refer_to(options.model or pipeline.default_for(options.task), options.version)
        spec = await pipeline.prepare(model, call.deadline, call.caller)
        options.reader(spec)  # raises WrongTask if the dialect lacks its task
    others = [
        one for one in await detectors(request, worker, pipeline, TASK_TYPES) if one.pinned.reference != spec.pinned.reference
    ]
    return {"models": [to_description(spec, wanted.model_id), *map(to_description, others)]}


def _infer_route(path: str, task: Task) -> HTTPRouteHandler:
    """Make a route of v1. Its task only chooses the default model: the answer is that of the model."""
    kind: Any = msgspec.defstruct("_Parameters", (), bases=(_V1Parameters,), namespace={"task": task}, frozen=True, kw_only=True)

    async def infer(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
        """Detect objects in an image, or in each of a list of images. If one image fails, the request fails."""
        body = InferenceBody()
        context = context_of(request.scope)

        async def respond(answer: ImagesAnswer[Detections, Detections], wanted: _V1Parameters, call: CallContext) -> ASGIResponse:
            found = answer.all()

            def describe(pictures: Sequence[bytes] = ()) -> object:
                ids = [f"{context.request_id}-{index}" for index in range(len(found))] if body.is_list else [context.request_id]
                ms, least = context.timing.total, wanted.keypoint_confidence
                described = [to_inference(one, id_, ms, least, picture) for one, id_, picture in zip_longest(found, ids, pictures)]
                return described if body.is_list else described[0]

            if body.is_list or body.drawn:  # large responses
                drawable = list(zip(body.drawn, found, strict=False))  # none if no pictures are wanted
                return await drawn.respond_with_pictures(pipeline, call, drawable, describe)
            return await respond_json(describe, found[0], pipeline, call)

        return await answer_each(request, worker, pipeline, kind, body.parse, respond)

    return ModelRoute(path, task=None, takes="images", key_in="body")(infer)


@ModelRoute(_V0, key_in="query", has_streams=True)
async def infer_v0(
    request: AnyRequest, worker: Worker, pipeline: WorkerPipeline, model: FromPath[str], version: FromPath[int]
) -> ASGIResponse:
    """Detect objects with the model in the path."""

    async def respond(given: ResponseInput[Detections]) -> ASGIResponse:
        if given.wanted.format == "image":
            return await drawn.IMAGE.respond(given)
        if given.wanted.format == "image_and_json":
            describe = partial(describe_v0, given)
            return await drawn.respond_with_pictures(given.pipeline, given.call, [(given.image, given.found)], describe)
        return await respond_json(partial(describe_v0, given), given.found, given.pipeline, given.call)

    in_path = [("model", model), ("version", str(version))]
    return await handle_image(request, worker, pipeline, _V0Parameters, in_path, parse=parse_v0, respond=respond)


def describe_v0(given: ResponseInput[Detections], pictures: Sequence[bytes] = ()) -> dict[str, Any]:
    """Convert the detections in the image of a request; add the first picture, if any."""
    context, threshold = given.context, given.wanted.keypoint_confidence
    return to_inference(given.found, context.request_id, context.timing.total, threshold, pictures[0] if pictures else None)


def _to_number(confidence: float | Usual) -> float:
    return _DEFAULTS.confidence if isinstance(confidence, str) else confidence


def _to_fraction(number: float) -> float:
    """Convert a fraction or a percentage to a fraction: 1 is one percent."""
    return number / 100 if number >= 1 else number


DIALECT = Dialect(
    "roboflow",
    [
        *(list_models, add_model, infer_v0, *roboflow_core.ROUTES),
        _infer_route("/infer/object_detection", "detection"),
        _infer_route("/infer/instance_segmentation", "segmentation"),
        _infer_route("/infer/keypoints_detection", "pose"),
    ],
    lambda problem: {"status": problem.status, "message": problem.detail},
    applies={_V0: lambda scope: scope["method"] == "POST" and not scope["path"].startswith("/predict/")},  # the gateway's own
)
