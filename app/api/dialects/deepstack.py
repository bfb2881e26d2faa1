"""The dialect of DeepStack, CodeProject.AI and their clients: Home Assistant, Blue Iris, Frigate's detector `deepstack`.

Source: DeepStack's server.go, middlewares.go and response.go; CodeProject.AI's ProxyController.cs; Frigate's deepstack.py.
"""

from datetime import UTC, datetime
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl

import msgspec
from litestar import get
from litestar.di import NamedDependency
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from msgspec import Meta

from app import __version__
from app.api.answering.format import ResponseInput
from app.api.answering.native import to_scores
from app.api.answering.responses import JsonResponse
from app.api.answering.schema import Problem
from app.api.context import context_of
from app.api.dependencies import WorkerResources
from app.api.dialects.detection import detect, receive_text
from app.api.dialects.detectors import detectors
from app.api.dialects.dialect import AnyRequest, Dialect, DialectParameters
from app.api.parameters.parse import Pairs, split_classes
from app.api.receiving import multipart
from app.api.receiving.body import MAX_PARTS, ParsedBody, parse_multipart
from app.api.receiving.content_type import MULTIPART, URLENCODED, media_type
from app.api.routes import ModelRoute
from app.pipeline.call import MAX_DETECTIONS, Detections, DetectOptions

_NAMED = 20
"""Maximum number of objects named in `message`."""
_HOST = "localhost"
# CodeProject.AI's spelling of the members.
_CASED = {
    "inference_ms": "inferenceMs",
    "process_ms": "processMs",
    "analysis_round_trip_ms": "analysisRoundTripMs",
    "module_id": "moduleId",
    "module_name": "moduleName",
    "execution_provider": "executionProvider",
    "can_use_gpu": "canUseGPU",
    "timestamp_utc": "timestampUTC",
    "status_data": "statusData",
    "inference_device": "inferenceDevice",
    "processed_by": "processedBy",
}


class _Parameters(DialectParameters, frozen=True, kw_only=True):
    min_confidence: Annotated[float, Meta(ge=0, le=1)] = 0.4
    url: str | None = None
    """The URL of the image, if its field contains one. Not part of DeepStack."""
    classes: str | None = None
    """Names or ids, separated by commas. Not part of DeepStack; for Frigate, which drops all objects after an unknown label."""
    max_objects: Annotated[int, Meta(ge=1, le=MAX_DETECTIONS)] = MAX_DETECTIONS
    """Maximum number of objects, the best ones. Not part of DeepStack; for Frigate, which fails with more than 20."""

    @property
    def options(self) -> DetectOptions:
        """The options of the detection."""
        return DetectOptions(self.model, self.min_confidence, split_classes(self.classes), self.max_objects, version=self.version)


class Prediction(msgspec.Struct, frozen=True):
    """One object; corners in whole pixels of the upright image."""

    confidence: float
    label: str
    y_min: int
    x_min: int
    y_max: int
    x_max: int


class Predictions(msgspec.Struct, frozen=True, kw_only=True, rename=_CASED):
    """DeepStack's response, objects by descending confidence, with CodeProject.AI's additions. Times are in milliseconds."""

    success: Literal[True] = True
    predictions: list[Prediction]
    duration: int
    message: str
    count: int
    inference_ms: int
    process_ms: int
    analysis_round_trip_ms: int
    code: int = 200
    command: Literal["detect", "custom"]
    module_id: str = "nereid"
    module_name: str = "Nereid"
    execution_provider: str
    processed_by: str = _HOST
    can_use_gpu: bool
    timestamp_utc: str


class ModelNames(msgspec.Struct, frozen=True, kw_only=True, rename=_CASED):
    """The detectors available at `/v1/vision/custom/{model}`."""

    success: Literal[True] = True
    models: list[str]
    command: Literal["list"] = "list"
    module_id: str = "nereid"
    module_name: str = "Nereid"
    status_data: None = None
    inference_device: str
    analysis_round_trip_ms: int = 0
    processed_by: str = _HOST
    timestamp_utc: str


class Version(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """A version of the service."""

    major: int
    minor: int
    patch: int
    pre_release: str = ""
    security_update: bool = False
    build: int = 0
    file: str = ""
    release_notes: str = ""


class UpdateStatus(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The update status: always no update, because the gateway does not check for updates."""

    success: Literal[True] = True
    message: str = ""
    version: None = None
    current: Version
    latest: Version
    update_available: Literal[False] = False


@ModelRoute("/v1/vision/detection", key_in="body")
async def detection(request: AnyRequest, worker: NamedDependency[WorkerResources]) -> ASGIResponse:
    """Detect objects with the default model."""
    return await _detect(request, worker, "detect")


@ModelRoute("/v1/vision/custom/{model:str}", key_in="body")
async def custom(request: AnyRequest, worker: NamedDependency[WorkerResources], model: FromPath[str]) -> ASGIResponse:
    """Detect objects with the model in the path."""
    return await _detect(request, worker, "custom", [("model", model)])


@ModelRoute("/v1/vision/custom/list", takes="text", key_in="body", is_get=True)
async def list_custom(request: AnyRequest, worker: NamedDependency[WorkerResources]) -> ModelNames:
    """List the detectors."""
    if context_of(request.scope).is_anonymous:
        await receive_text(request, worker, _Parameters, _parse_form)
    specs = await detectors(request, worker)
    device = "GPU" if any(spec.device == "gpu" for spec in specs) else "CPU"
    return ModelNames(models=[spec.name for spec in specs], inference_device=device, timestamp_utc=_now())


@get("/v1/status/updateavailable")
async def update_available() -> UpdateStatus:
    """Report that there is no update. Clients request this before they show the service as working."""
    major, minor, patch = map(int, __version__.split(".")[:3])
    version = Version(major=major, minor=minor, patch=patch)
    return UpdateStatus(current=version, latest=version)


async def _detect(
    request: AnyRequest, worker: WorkerResources, command: Literal["detect", "custom"], in_path: Pairs = ()
) -> ASGIResponse:
    async def respond(given: ResponseInput[Detections], _: _Parameters) -> JsonResponse:
        return JsonResponse(msgspec.json.encode(to_predictions(given, command)))

    return await detect(request, worker, _Parameters, _parse, respond, in_path)


def _parse_form(data: bytes, content_type: str, _: type[_Parameters]) -> ParsedBody:
    """Parse a form without an image. Clients may send it as multipart, URL-encoded or empty."""
    if not data:
        return ParsedBody(b"", [])
    if media_type(content_type) == URLENCODED:
        return ParsedBody(b"", parse_qsl(data.decode("latin-1"), keep_blank_values=True))
    parts = multipart.read_parts(data, content_type, MAX_PARTS)
    return ParsedBody(b"", [multipart.to_parameter(part, "another request") for part in parts])


def _parse(data: bytes, content_type: str, _: type[_Parameters]) -> ParsedBody:
    """Parse a form; anything else is the image."""
    return parse_multipart(data, content_type) if media_type(content_type) == MULTIPART else ParsedBody(data, [])


def to_predictions(given: ResponseInput[Detections], command: Literal["detect", "custom"]) -> Predictions:
    """Convert detections to a response."""
    found, timing = given.found, given.context.timing
    predictions = [
        Prediction(confidence, found.spec.class_name(id_), y_min, x_min, y_max, x_max)
        for confidence, id_, (x_min, y_min, x_max, y_max) in zip(
            to_scores(found.scores), found.class_ids.tolist(), found.boxes.round().astype(int).tolist(), strict=True
        )
    ]
    total = round(timing.total)
    return Predictions(
        predictions=predictions,
        duration=total,
        message=f"Found {', '.join(prediction.label for prediction in predictions[:_NAMED])}"
        if predictions
        else "No objects found",
        count=len(predictions),
        inference_ms=round(timing.stages.get("infer", 0)),
        process_ms=total,
        analysis_round_trip_ms=total,
        command=command,
        execution_provider="GPU" if found.spec.device == "gpu" else "CPU",
        can_use_gpu=found.spec.device == "gpu",
        timestamp_utc=_now(),
    )


def write_error(problem: Problem) -> dict[str, Any]:
    """Convert a problem to DeepStack's error format, with CodeProject.AI's `code`."""
    return {"success": False, "error": problem.detail, "duration": 0, "code": problem.status}


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


# DeepStack's own clients expect 400 for a bad image.
DIALECT = Dialect("deepstack", [detection, custom, list_custom, update_available], write_error, statuses={415: 400, 422: 400})
