"""The dialect of DeepStack, CodeProject.AI and their clients: Home Assistant, Blue Iris, Frigate's detector `deepstack`.

Source: DeepStack's server.go, middlewares.go and response.go; CodeProject.AI's ProxyController.cs and ServerStatusController.cs;
Frigate's deepstack.py.
"""

from collections.abc import Sequence
from email.utils import formatdate
from functools import partial
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import parse_qsl

import msgspec
from litestar import get, post
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from litestar.types import ASGIApp
from msgspec import Meta

from app import __version__
from app.api.answering.format import ResponseInput
from app.api.answering.native import objects
from app.api.answering.responses import JsonResponse
from app.api.batch.answer import ImagesAnswer
from app.api.batch.body import ParsedBatch
from app.api.context import AnyRequest, RequestContext, context_of
from app.api.dependencies import Worker, WorkerPipeline
from app.api.detect import handle_image
from app.api.dialects.dialect import READING, Dialect, DialectParameters, answer_each, by_json, detectors
from app.api.parameters.parse import Fraction, split_classes
from app.api.pass_on import pass_on
from app.api.receiving import multipart
from app.api.receiving.body import MAX_PARTS, ParsedBody, parse_body
from app.api.receiving.content_type import URLENCODED, media_type
from app.api.receiving.intake import Receiving
from app.api.routes import ModelRoute
from app.api.sight.faces import LARGEST, compare, parse_pair, require_faces
from app.api.sight.ocr import box_of, read_regions
from app.cascade.named import named_cascade
from app.cascade.run import CascadeAnswer
from app.errors import NotOffered
from app.model.heads import PoseHead
from app.model.reference import split_reference
from app.pipeline.call import MAX_DETECTIONS, CallContext, DetectOptions
from app.pipeline.results import Detections

_NAMED = 20
_FRIGATE_ROWS = 20
"""Maximum number of objects that Frigate's detector can take."""
_MODULE = {"moduleId": "nereid", "moduleName": "Nereid", "processedBy": "localhost"}


class _Parameters(DialectParameters, frozen=True, kw_only=True):
    min_confidence: Fraction | Literal[""] = ""
    url: str | None = None
    classes: str | None = None
    """Names or ids, separated by commas. Not part of DeepStack; for Frigate, which drops all objects after an unknown label."""
    max_objects: Annotated[int, Meta(ge=1, le=MAX_DETECTIONS)] | None = None
    """Maximum number of objects, the best ones. Not part of DeepStack; for Frigate, which exits if there are too many."""

    @property
    def options(self) -> DetectOptions:
        # Frigate's form without a key: other clients leave out an empty key, or send `min_confidence` too.
        is_frigate = self.api_key == self.min_confidence == ""
        maximum = self.max_objects or (_FRIGATE_ROWS if is_frigate else MAX_DETECTIONS)
        confidence = 0.4 if self.min_confidence == "" else self.min_confidence
        return DetectOptions(self.model, confidence, split_classes(self.classes) or None, maximum, version=self.version)


class _FaceParameters(_Parameters, frozen=True, kw_only=True):
    @property
    def options(self) -> DetectOptions:
        return super().options._replace(task=PoseHead.task)


class _MatchParameters(DialectParameters, frozen=True, kw_only=True):
    confidence: ClassVar[float] = 0.5


@ModelRoute(["/v1/vision/detection", "/v1/vision/custom/{model:str}"], key_in="body", has_streams=True)
async def detection(
    request: AnyRequest, worker: Worker, pipeline: WorkerPipeline, model: FromPath[str | None] = None
) -> ASGIResponse:
    """Detect objects with the model in the path, or with the default model."""
    respond, in_path = by_json(partial(to_predictions, "custom" if model else "detect")), [("model", model)] if model else []
    return await handle_image(request, worker, pipeline, _Parameters, in_path, parse=parse_body, respond=respond)


@ModelRoute("/v1/vision/face", task=None, key_in="body")
async def faces(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
    """Detect faces."""
    require_faces(worker)
    name, version = split_reference(named_cascade(worker, "faces", "faces").model)
    in_path = [("model", name), *([("version", version)] if version else [])]
    respond = by_json(partial(to_predictions, "face"))
    return await handle_image(request, worker, pipeline, _FaceParameters, in_path, parse=parse_body, respond=respond)


@ModelRoute("/v1/vision/face/match", task=None, takes="images", key_in="body")
async def match(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
    """Compare the largest faces of two images."""
    require_faces(worker)

    async def respond(answer: ImagesAnswer[Any, CascadeAnswer], _: _MatchParameters, __: CallContext) -> ASGIResponse:
        context = context_of(request.scope)
        alike = compare(answer.all(), 0, context).similarity
        total = round(context.timing.total)
        return JsonResponse(msgspec.json.encode({"success": True, "similarity": alike, "duration": total, "code": 200, **_MODULE}))

    return await answer_each(request, worker, pipeline, _MatchParameters, parse_pair, respond, LARGEST)


@post([f"/v1/vision/face/{verb}" for verb in ("recognize", "register", "list", "delete")], status_code=200, include_in_schema=False)
async def names(request: AnyRequest, worker: Worker) -> ASGIApp:
    """Pass a request about the names of faces on to search, which keeps them; raise NotOffered if search is off."""
    if worker.search is None:
        path = request.scope["path"].removeprefix("/deepstack")
        reason = "without search, faces have no names; `nereid serve --search` turns it on"
        raise NotOffered(f"{path} is off: {reason}; /v1/vision/face/match compares two faces")
    return pass_on(worker)


@ModelRoute(["/v1/image/ocr", "/v1/vision/ocr"], task="text_detection", key_in="body")
async def read(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
    """Read the text in an image: the label of each line is its text."""

    async def respond(answer: ImagesAnswer[Any, CascadeAnswer], wanted: _Parameters, _: CallContext) -> ASGIResponse:
        (found,) = answer.all()
        lines = read_regions(found, wanted.options.confidence)
        predictions = [to_prediction(line.rec_score, box_of(line), line.text) for line in lines]
        is_gpu = any(result.spec.device == "gpu" for result in found.require("text").results)
        return JsonResponse(msgspec.json.encode(_describe("ocr", predictions, context_of(request.scope), is_gpu=is_gpu)))

    return await answer_each(request, worker, pipeline, _Parameters, parse_one, respond, READING)


@ModelRoute("/v1/vision/custom/list", takes="text", key_in="body", is_get=True)
async def list_custom(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> dict[str, Any]:
    """List the detectors available at `/v1/vision/custom/{model}`."""
    if context_of(request.scope).is_anonymous:
        async with Receiving(request, worker, _Parameters, parse_form, may_be_empty=True):
            pass  # it has the key
    specs = await detectors(request, worker, pipeline)
    return {
        "success": True,
        "models": [spec.name for spec in specs],
        "command": "list",
        **_MODULE,
        "statusData": None,
        "inferenceDevice": "GPU" if any(spec.device == "gpu" for spec in specs) else "CPU",
        "analysisRoundTripMs": 0,
        "timestampUTC": formatdate(usegmt=True),
    }


@get(["/v1/status/ping", "/v1/server/status/ping"])
async def ping() -> dict[str, Any]:
    """Report that the service answers, and its version."""
    return {"success": True, "message": __version__, "version": _version()}


@get(["/v1/status/updateavailable", "/v1/server/status/updateavailable"])
async def update_available() -> dict[str, Any]:
    """Report that there is no update. Clients request this before they show the service as working."""
    versions = {"version": None, "current": _version(), "latest": _version(), "updateAvailable": False}
    return {"success": True, "message": "", **versions}


def _version() -> dict[str, Any]:
    numbers = dict(zip(("major", "minor", "patch"), map(int, __version__.split(".")[:3]), strict=True))
    return {**numbers, "preRelease": "", "securityUpdate": False, "build": 0, "file": "", "releaseNotes": ""}


def parse_one(data: bytes, content_type: str, kind: type[DialectParameters]) -> ParsedBatch:
    """Parse a body with one image."""
    image, parameters = parse_body(data, content_type, kind)
    return ParsedBatch([image], [None], parameters)


def parse_form(data: bytes, content_type: str, _: type[DialectParameters]) -> ParsedBody:
    """Parse a form without an image. Clients may send it as multipart, URL-encoded or empty."""
    if not data or media_type(content_type) == URLENCODED:
        return ParsedBody(b"", parse_qsl(data.decode("latin-1"), keep_blank_values=True))
    parts = multipart.read_parts(data, content_type, MAX_PARTS)
    return ParsedBody(b"", [multipart.to_parameter(part, "another request") for part in parts])


def to_predictions(command: str, given: ResponseInput[Detections]) -> dict[str, Any]:
    """Convert detections to DeepStack's response, by descending confidence; faces have no labels."""
    found = given.found
    named = ((confidence, box, None if command == "face" else name) for box, confidence, _, name in objects(found, "pixel", 0))
    return _describe(command, [to_prediction(*each) for each in named], given.context, is_gpu=found.spec.device == "gpu")


def to_prediction(confidence: float, box: Sequence[float], label: str | None) -> dict[str, Any]:
    """Describe an object; corners in whole pixels of the upright image."""
    sides = {side: round(at) for side, at in zip(("x_min", "y_min", "x_max", "y_max"), box, strict=True)}
    return {"confidence": confidence, **({} if label is None else {"label": label}), **sides}


def _describe(command: str, predictions: list[dict[str, Any]], context: RequestContext, *, is_gpu: bool) -> dict[str, Any]:
    named = ", ".join(prediction.get("label", command) for prediction in predictions[:_NAMED])
    message, device = f"Found {named}" if predictions else "No objects found", "GPU" if is_gpu else "CPU"
    own = {"predictions": predictions, "message": message, "count": len(predictions)}
    return complete(command, context, own) | {"executionProvider": device, "canUseGPU": is_gpu}


def complete(command: str, context: RequestContext, own: dict[str, Any]) -> dict[str, Any]:
    """Add to a response what all have, with CodeProject.AI's additions; times in milliseconds."""
    total = round(context.timing.total)
    return {
        "success": True,
        **own,
        "duration": total,
        "inferenceMs": round(context.timing.stages.get("infer", 0)),
        "processMs": total,
        "analysisRoundTripMs": total,
        "code": 200,
        "command": command,
        **_MODULE,
        "timestampUTC": formatdate(usegmt=True),
    }


# DeepStack's own clients expect 400 for a bad image.
DIALECT = Dialect(
    "deepstack",
    [detection, faces, match, names, read, list_custom, ping, update_available],
    lambda problem: {"success": False, "error": problem.detail, "duration": 0, "code": problem.status},
    statuses={415: 400, 422: 400},
)
