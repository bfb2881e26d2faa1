"""The dialect of DeepStack, CodeProject.AI and their clients: Home Assistant, Blue Iris, Frigate's detector `deepstack`.

Source: DeepStack's server.go, middlewares.go and response.go; CodeProject.AI's ProxyController.cs; Frigate's deepstack.py.
"""

from collections.abc import Sequence
from email.utils import formatdate
from functools import partial
from hashlib import blake2b
from typing import Annotated, Any, ClassVar, Literal
from urllib.parse import parse_qsl

import msgspec
from litestar import get
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from msgspec import Meta

from app import __version__
from app.api.answering.format import ResponseInput
from app.api.answering.native import objects
from app.api.answering.responses import JsonResponse
from app.api.answering.schema import Problem
from app.api.batch.answer import ImagesAnswer
from app.api.batch.body import MAX_IMAGES, ParsedBatch, parse_batch
from app.api.context import RequestContext, context_of
from app.api.dependencies import Worker, WorkerPipeline, WorkerResources
from app.api.dialects.dialect import READING, AnyRequest, Dialect, DialectParameters, answer_each, detect, detectors, receive_text
from app.api.parameters.parse import Fraction, split_classes
from app.api.receiving import multipart
from app.api.receiving.body import MAX_PARTS, ParsedBody, parse_body
from app.api.receiving.content_type import MULTIPART, URLENCODED, media_type
from app.api.routes import ModelRoute
from app.api.search.asking import ROUNDING
from app.api.sight.faces import LARGEST, compare, parse_pair, require_faces
from app.api.sight.image import Asking
from app.api.sight.ocr import box_of, read_regions
from app.cascade.named import named_cascade
from app.cascade.run import CascadeAnswer
from app.embedding.outputs import cosine_at, similarity_at
from app.errors import InvalidParameter, MalformedRequest, NoFace, NotOffered, UnsupportedModel
from app.model.heads import PoseHead
from app.model.reference import split_reference
from app.pipeline.batch_request import Image
from app.pipeline.call import MAX_DETECTIONS, CallContext, DetectOptions
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Detections
from app.search.describe import Parts
from app.search.engine import NewImage
from app.search.names import LEAST_QUALITY, PersonName, find_names
from app.search.service import Search, hash_content

_NAMED = 20
"""Maximum number of objects named in `message`."""
_FRIGATE_ROWS = 20
"""Maximum number of objects that Frigate's detector can take."""
_MODULE = {"moduleId": "nereid", "moduleName": "Nereid", "processedBy": "localhost"}
"""CodeProject.AI's additions that are the same in all responses."""
_REGISTERED = "deepstack-face-"
"""What the ids of pictures begin with that were registered."""
_UNKNOWN = "unknown"
"""The name of whoever is not registered."""
_SIDES = ("x_min", "y_min", "x_max", "y_max")


class _Parameters(DialectParameters, frozen=True, kw_only=True):
    min_confidence: Fraction | Literal[""] = ""
    """Empty as if it were missing: 0.4."""
    url: str | None = None
    """The URL of the image, if its field contains one. Not part of DeepStack."""
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


class _UserParameters(DialectParameters, frozen=True, kw_only=True):
    userid: PersonName | None = None

    @property
    def name(self) -> str:
        if self.userid is None:
            raise InvalidParameter("userid is missing: the name of the person")
        return self.userid


class _RecognizeParameters(DialectParameters, frozen=True, kw_only=True):
    min_confidence: Fraction | Literal[""] = ""
    """Minimum similarity; empty as if it were missing: that of the distance for which the model was made."""

    @property
    def least(self) -> float:
        return 0.6 if self.min_confidence == "" else self.min_confidence


@ModelRoute(["/v1/vision/detection", "/v1/vision/custom/{model:str}"], key_in="body")
async def detection(
    request: AnyRequest, worker: Worker, pipeline: WorkerPipeline, model: FromPath[str | None] = None
) -> ASGIResponse:
    """Detect objects with the model in the path, or with the default model."""
    describe = partial(to_predictions, "custom" if model else "detect")
    return await detect(request, worker, pipeline, _Parameters, parse_body, describe, [("model", model)] if model else [])


@ModelRoute("/v1/vision/face", task=None, key_in="body")
async def faces(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
    """Detect faces."""
    require_faces(worker)
    name, version = split_reference(named_cascade(worker, "faces", "faces").model)
    in_path = [("model", name), *([("version", version)] if version else [])]
    return await detect(request, worker, pipeline, _FaceParameters, parse_body, partial(to_predictions, "face"), in_path)


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


# The keys of cameras have the scope `detect`, and tell persons apart. Who else has been registered is only for those that search.
@ModelRoute("/v1/vision/face/recognize", task=None, key_in="body")
async def recognize(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
    """Tell whose the faces in an image are, each by the most similar registered face, if it is similar enough."""
    search = _require_names(request, worker)

    async def respond(answer: ImagesAnswer[Any, NewImage], wanted: _RecognizeParameters, call: CallContext) -> ASGIResponse:
        (image,) = answer.all()
        far, context = await search.match_distance(call), context_of(request.scope)
        least, predictions = cosine_at(wanted.least, far) - ROUNDING, []
        async with search.database.asking(call) as engine:
            named = await find_names(engine, context.tenant, image.faces, least)
        for face, best in zip(image.faces, named, strict=True):
            score = round(similarity_at(best.score, far), 4) if best else 0
            box = [side * size for side, size in zip(face.box, (image.width, image.height) * 2, strict=True)]
            predictions.append({"userid": best.name if best else _UNKNOWN, **_to_prediction(score, box, None)})
        is_known = any(each["userid"] != _UNKNOWN for each in predictions)
        message = "A face was recognised" if is_known else "No known faces"
        return _respond("recognize", context, message=message, predictions=predictions, count=len(predictions))

    return await answer_each(request, worker, pipeline, _RecognizeParameters, _parse_one, respond, _FACES)


@ModelRoute("/v1/vision/face/register", task=None, takes="images", key_in="body", scope="ingest")
async def register(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
    """Keep the largest face of each image as one of the person `userid`."""
    search = _require_names(request, worker)

    async def respond(answer: ImagesAnswer[Any, NewImage], wanted: _UserParameters, call: CallContext) -> ASGIResponse:
        images, tenant = answer.all(), context_of(request.scope).tenant
        for image in images:
            face = max(image.faces, key=lambda face: (face.box[2] - face.box[0]) * (face.box[3] - face.box[1]), default=None)
            if face is None or not face.vectors:
                raise NoFace("there is an image in which no face was found")
            if face.quality < LEAST_QUALITY:
                raise NoFace(
                    f"the face in an image is too small, turned or unclear: its quality, {face.quality}, is below {LEAST_QUALITY}"
                )
            image.faces = [face]
        async with search.database.asking(call) as engine:
            is_known = await engine.register(tenant, wanted.name, images)
        return _respond("register", context_of(request.scope), message="face updated" if is_known else "face added")

    return await answer_each(request, worker, pipeline, _UserParameters, _parse_images, respond, _FACES)


@ModelRoute("/v1/vision/face/list", task=None, takes="text", key_in="body", scope="search")
async def list_faces(request: AnyRequest, worker: Worker) -> ASGIResponse:
    """List the names under which faces are registered."""
    search = _require_names(request, worker)
    _, _, call = await receive_text(request, worker, DialectParameters, _parse_form)
    context = context_of(request.scope)
    async with search.database.asking(call) as engine:
        names = await engine.names(context.tenant)
    return _respond("list", context, faces=names)


@ModelRoute("/v1/vision/face/delete", task=None, takes="text", key_in="body", scope="ingest")
async def delete_faces(request: AnyRequest, worker: Worker) -> ASGIResponse:
    """Delete all faces that are registered under a name; nothing if there is none."""
    search = _require_names(request, worker)
    _, wanted, call = await receive_text(request, worker, _UserParameters, _parse_form)
    context = context_of(request.scope)
    async with search.database.asking(call) as engine:
        await engine.forget(context.tenant, wanted.name)
    return _respond("delete", context)


def _require_names(request: AnyRequest, worker: WorkerResources) -> Search:
    """Return the search of a worker, which keeps names of faces; raise NotOffered if it has none, or faces are off."""
    if worker.search is None:
        path = request.scope["path"].removeprefix("/deepstack")
        reason = "without search, faces have no names; `nereid serve --search` turns it on"
        raise NotOffered(f"{path} is off: {reason}; /v1/vision/face/match compares two faces")
    require_faces(worker)
    return worker.search


async def _describe_faces(
    worker: WorkerResources, _: Pipeline, image: bytes, wanted: DialectParameters, call: CallContext
) -> NewImage:
    """Find and describe the faces in an image. A picture of a person is kept once, and apart from the same one that is indexed."""
    assert worker.search is not None  # noqa: S101 - see `_require_names`
    name = wanted.name if isinstance(wanted, _UserParameters) else ""
    digest = blake2b(await hash_content(image), digest_size=32, key=blake2b(name.encode()).digest()).digest()
    new = NewImage(image_id=f"{_REGISTERED}{digest.hex()[:32]}", content_hash=digest, width=0, height=0)
    described = await worker.search.describe(new, image, call, Parts(objects=False, text=False, vectors=False))
    for reason in described.errors.values():
        raise UnsupportedModel(reason)
    return new


_FACES: Asking[Any, NewImage] = Asking(lambda worker, _: named_cascade(worker, "faces", "faces").model, _describe_faces)


@ModelRoute(["/v1/image/ocr", "/v1/vision/ocr"], task="text_detection", key_in="body")
async def read(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
    """Read the text in an image: the label of each line is its text."""

    async def respond(answer: ImagesAnswer[Any, CascadeAnswer], wanted: _Parameters, _: CallContext) -> ASGIResponse:
        (found,) = answer.all()
        lines = read_regions(found, wanted.options.confidence)
        predictions = [_to_prediction(line.rec_score, box_of(line), line.text) for line in lines]
        is_gpu = any(result.spec.device == "gpu" for result in found.require("text").results)
        return JsonResponse(msgspec.json.encode(_describe("ocr", predictions, context_of(request.scope), is_gpu=is_gpu)))

    return await answer_each(request, worker, pipeline, _Parameters, _parse_one, respond, READING)


@ModelRoute("/v1/vision/custom/list", takes="text", key_in="body", is_get=True)
async def list_custom(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> dict[str, Any]:
    """List the detectors available at `/v1/vision/custom/{model}`."""
    if context_of(request.scope).is_anonymous:
        await receive_text(request, worker, _Parameters, _parse_form)
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


@get("/v1/status/updateavailable")
async def update_available() -> dict[str, Any]:
    """Report that there is no update. Clients request this before they show the service as working."""
    numbers = dict(zip(("major", "minor", "patch"), map(int, __version__.split(".")[:3]), strict=True))
    version = {**numbers, "preRelease": "", "securityUpdate": False, "build": 0, "file": "", "releaseNotes": ""}
    return {
        "success": True,
        "message": "",
        "version": None,
        "current": version,
        "latest": version,
        "updateAvailable": False,
    }


def _parse_one(data: bytes, content_type: str, kind: type[DialectParameters]) -> ParsedBatch:
    image, parameters = parse_body(data, content_type, kind)
    return ParsedBatch([image], [None], parameters)


def _parse_images(data: bytes, content_type: str, kind: type[DialectParameters]) -> ParsedBatch:
    """Parse a form whose files are images, whatever the names of their fields; or JSON with `images`."""
    if media_type(content_type) != MULTIPART:
        return parse_batch(data, content_type, kind)
    parts = list(multipart.read_parts(data, content_type, MAX_IMAGES))
    images: list[Image] = [part.content or MalformedRequest("the image is empty") for part in parts if part.file_name is not None]
    if not images:
        raise MalformedRequest("there is no image; send one as a file, in the field image or image1")
    return ParsedBatch(images, [], [multipart.to_parameter(part, "image") for part in parts if part.file_name is None])


def _parse_form(data: bytes, content_type: str, _: type[DialectParameters]) -> ParsedBody:
    """Parse a form without an image. Clients may send it as multipart, URL-encoded or empty."""
    if not data or media_type(content_type) == URLENCODED:
        return ParsedBody(b"", parse_qsl(data.decode("latin-1"), keep_blank_values=True))
    parts = multipart.read_parts(data, content_type, MAX_PARTS)
    return ParsedBody(b"", [multipart.to_parameter(part, "another request") for part in parts])


def to_predictions(command: str, given: ResponseInput[Detections]) -> dict[str, Any]:
    """Convert detections to DeepStack's response, by descending confidence; faces have no labels."""
    found = given.found
    named = ((confidence, box, None if command == "face" else name) for box, confidence, _, name in objects(found, "pixel", 0))
    return _describe(command, [_to_prediction(*each) for each in named], given.context, is_gpu=found.spec.device == "gpu")


def _to_prediction(confidence: float, box: Sequence[float], label: str | None) -> dict[str, Any]:
    """Describe an object; corners in whole pixels of the upright image."""
    sides = {side: round(at) for side, at in zip(_SIDES, box, strict=True)}
    return {"confidence": confidence, **({} if label is None else {"label": label}), **sides}


def _describe(command: str, predictions: list[dict[str, Any]], context: RequestContext, *, is_gpu: bool) -> dict[str, Any]:
    """Make the response about objects."""
    named = ", ".join(prediction.get("label", command) for prediction in predictions[:_NAMED])
    message, device = f"Found {named}" if predictions else "No objects found", "GPU" if is_gpu else "CPU"
    own = {"predictions": predictions, "message": message, "count": len(predictions)}
    return _complete(command, context, own) | {"executionProvider": device, "canUseGPU": is_gpu}


def _respond(command: str, context: RequestContext, **own: Any) -> ASGIResponse:  # noqa: ANN401 - any JSON
    """Respond about faces of persons."""
    return JsonResponse(msgspec.json.encode(_complete(command, context, own)))


def _complete(command: str, context: RequestContext, own: dict[str, Any]) -> dict[str, Any]:
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


def write_error(problem: Problem) -> dict[str, Any]:
    """Convert a problem to DeepStack's error format, with CodeProject.AI's `code`."""
    return {"success": False, "error": problem.detail, "duration": 0, "code": problem.status}


# DeepStack's own clients expect 400 for a bad image.
DIALECT = Dialect(
    "deepstack",
    [detection, faces, match, recognize, register, list_faces, delete_faces, read, list_custom, update_available],
    write_error,
    statuses={415: 400, 422: 400},
)
