"""The dialect of Label Studio's ML backends: predicts regions for the tasks of a project.

Source: label_studio/ml/api_connector.py (the client; `MLApi._prep_prediction_req`) and models.py of Label Studio; the server in
label_studio_ml/api.py and response.py of label-studio-ml-backend.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, Literal

import msgspec
from litestar import get, post
from litestar.response.base import ASGIResponse
from litestar.types import HTTPScope

from app.api.answering.responses import JsonResponse, LargeResponse
from app.api.batch.answer import ImagesAnswer
from app.api.batch.body import MAX_IMAGES, ImageList, ParsedBatch, items_of
from app.api.caller.check import require_key
from app.api.context import context_of
from app.api.dependencies import Worker, WorkerPipeline
from app.api.dialects import labeling_config
from app.api.dialects.dialect import (
    AnyRequest,
    ConfidenceParameters,
    Dialect,
    OptionsByModel,
    answer_each,
    detectors,
    find_detector,
    receive_text,
)
from app.api.dialects.label_studio_regions import describe, estimate_bytes
from app.api.dialects.labeling_config import DEFAULT_THRESHOLD, KINDS, Control
from app.api.parameters.parse import Fraction
from app.api.receiving.body import JSON_ERRORS, ParsedBody, decode_base64, decode_json
from app.api.receiving.content_type import JSON, media_type
from app.api.routes import ModelRoute
from app.errors import MalformedRequest, ModelNotReady, UrlNotAllowed
from app.model.heads import HEADS, DetectionHead, Task
from app.model.reference import refer_to
from app.pipeline.batch_request import Image
from app.pipeline.call import CallContext, DetectOptions
from app.pipeline.results import Detections
from app.remote.address import TrustedOrigin, is_address
from app.resilience.lease import Lease

_UNNAMED = "$undefined$"
"""Key of data that was imported into Label Studio without a name."""
_JPEG = "/9j/"
"""Prefix of a JPEG in base64, which must not be taken for a path."""
_EXAMPLE = '{"tasks": [{"data": {"image": "https://..."}}], "label_config": "<View>...</View>"}'
_USER_AGENT = b"heartex/"
_FEW_BYTES = 150_000
"""Up to this estimate, responses are encoded on the event loop; thousands of regions take half a second."""
_TASKS: dict[str, Task] = {"PolygonLabels": "segmentation", "BrushLabels": "segmentation", "KeyPointLabels": "pose"}
"""Tasks of the default models for controls other than rectangles."""


class _Prediction(msgspec.Struct, frozen=True):
    tasks: ImageList
    label_config: str


class _Setup(msgspec.Struct, frozen=True):
    label_config: str | None = msgspec.field(default=None, name="schema")


def _read_tasks(data: bytes, content_type: str, origin: TrustedOrigin | None) -> tuple[list[Image], Sequence[Control]]:
    """Return the images of the tasks, of too many only the first, and the controls to fill in, which are all for one `Image`.

    `origin` is Label Studio's.
    """
    prediction = decode_json(data, content_type, _Prediction, _EXAMPLE)
    tasks = items_of(prediction.tasks)
    if not tasks:
        raise MalformedRequest(f"there are no tasks; expected {_EXAMPLE}")
    controls = labeling_config.read(prediction.label_config)
    if not controls:
        raise MalformedRequest(
            f"the labeling configuration has no {', '.join(KINDS[:-1])} or {KINDS[-1]} for an Image with a value such as $image"
        )
    kind = _task_type(controls[0].key)
    return [_to_image(task, kind, origin) for task in (tasks if len(tasks) <= MAX_IMAGES else tasks[:1])], controls


@lru_cache(maxsize=64)
def _task_type(key: str) -> type[Any]:
    """Make the type of a task with its image at a key. It is a Struct, which ignores any number of other keys."""
    names = {"image": key, "unnamed": _UNNAMED}
    fields = [(field, str | None, None) for field in names if field == "image" or key != _UNNAMED]
    try:
        data = msgspec.defstruct("_Data", fields, rename=names)
    except ValueError as error:  # not a valid JSON name
        raise MalformedRequest("the Image of the labeling configuration has a value that is not supported") from error
    return msgspec.defstruct("_Task", [("data", data)])


def _to_image(task: msgspec.Raw, kind: type[Any], origin: TrustedOrigin | None) -> Image:
    """Return the decoded image or its URL. Return, not raise, the error if there is neither."""
    try:
        values = msgspec.structs.astuple(msgspec.json.decode(task, type=kind).data)
    except JSON_ERRORS:
        values = ()
    text = next(filter(None, values), "").strip()
    if not text:
        return MalformedRequest("the task has no image where the labeling configuration says")
    if is_address(text) or (text.startswith("/") and not text.startswith(_JPEG)):
        return _to_address(text, origin)
    try:
        return decode_base64(text) or MalformedRequest("the image is empty")
    except MalformedRequest:
        return MalformedRequest("the image is neither an address nor base64")


def _to_address(text: str, origin: TrustedOrigin | None) -> Image:
    """Return the URL of an image in Label Studio, or any other text unchanged: it is checked later like any URL."""
    if origin is not None:
        try:
            return origin.parse(text) or text
        except UrlNotAllowed as error:
            return error
    if text.startswith("/"):
        return UrlNotAllowed("the image is in Label Studio, and NEREID_LABEL_STUDIO_URL does not say where")
    return text


class _Parameters(ConfidenceParameters, frozen=True, kw_only=True):
    kind = OptionsByModel
    confidence: Fraction = DEFAULT_THRESHOLD
    task: Task = DetectionHead.task
    masks: Literal["polygon", "png", "none"] = "none"

    @property
    def options(self) -> DetectOptions:
        return super().options._replace(task=self.task, masks=self.masks)


@get("/health")
async def health(request: AnyRequest, worker: Worker) -> dict[str, str]:
    """Report whether the default model is ready."""
    require_key(request, worker.keys, "detect", is_dialect=True)
    if not await worker.is_ready():
        raise ModelNotReady("the default model is not ready")
    return {"status": "UP", "model_class": "Nereid"}


@ModelRoute("/setup", takes="text", key_in="query")
async def setup(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> dict[str, str]:
    """Return the model of a project. Label Studio requests new predictions when it changes."""

    def parse(data: bytes, content_type: str, _: type[_Parameters]) -> ParsedBody:
        config = decode_json(data, content_type, _Setup, '{"schema": "<View>...</View>"}').label_config
        return ParsedBody(b"", _question_of(labeling_config.read(config) if config else ()))

    _, wanted, call = await receive_text(request, worker, _Parameters, parse)
    spec = await find_detector(pipeline, wanted.options, call)
    return {"model_version": refer_to(spec.name, spec.version)}


@get("/versions")
async def versions(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> dict[str, list[str]]:
    """List the models of all projects: Label Studio does not say for which project it asks."""
    return {"versions": [refer_to(spec.name, spec.version) for spec in await detectors(request, worker, pipeline, HEADS)]}


@ModelRoute("/predict", takes="images", key_in="query")
async def predict(request: AnyRequest, worker: Worker, pipeline: WorkerPipeline) -> ASGIResponse:
    """Detect objects in the images of tasks.

    If there are too many tasks, only the first one gets a prediction; Label Studio then requests each task separately.
    """
    controls: list[Control] = []

    def parse(data: bytes, content_type: str, _: type[_Parameters]) -> ParsedBatch:
        images, found = _read_tasks(data, content_type, pipeline.fetcher.origin)
        controls.extend(found)
        threshold = min(control.threshold for control in controls)
        timeout_ms = int(pipeline.limits.max_timeout_seconds * 1e3)  # Label Studio waits for 100 s
        pairs = [*_question_of(controls), ("confidence", str(threshold)), ("timeout_ms", str(timeout_ms))]
        return ParsedBatch(images, [None] * len(images), pairs)

    async def respond(answer: ImagesAnswer[Detections, Detections], _: _Parameters, call: CallContext) -> ASGIResponse:
        found = answer.all_or_errors()
        nbytes = estimate_bytes(found, controls)
        if nbytes <= _FEW_BYTES and len(found) == 1:
            return JsonResponse(describe(found, controls))
        with Lease() as lease:
            memory = pipeline.admission.memory.reserve(call.caller)
            lease.on_release(memory.release)
            memory.add(nbytes)
            body = await pipeline.threads.run(partial(describe, found, controls), call.deadline, lease, turn=call.turn())
        return LargeResponse(body, JSON, pipeline.admission.memory)

    return await answer_each(request, worker, pipeline, _Parameters, parse, respond)


@post("/webhook", status_code=201)
async def webhook() -> dict[str, str]:
    """Ignore the events of a project: the gateway does not train models."""
    return {"status": "ok"}


def _question_of(controls: Sequence[Control]) -> list[tuple[str, str]]:
    """Return the parameters that controls set: the first model that any names, which all use, or the task of the default model."""
    models = [("model", control.model) for control in controls if control.model is not None][:1]
    kinds = {control.kind for control in controls}
    tasks = [("task", task) for kind, task in _TASKS.items() if kind in kinds][:1]
    masks = "png" if "BrushLabels" in kinds else "polygon" if "PolygonLabels" in kinds else "none"
    return [*models, *tasks, ("masks", masks)]


def _is_label_studio(scope: HTTPScope) -> bool:
    """Return whether Label Studio sent a request to `/health`, a path that the gateway also has."""
    return any(name == b"user-agent" and value.startswith(_USER_AGENT) for name, value in scope["headers"])


def _is_json(scope: HTTPScope) -> bool:
    """Return whether a body is JSON: another dialect's `/predict` takes forms."""
    return media_type(context_of(scope).content_type) == JSON


DIALECT = Dialect(
    "label-studio",
    [health, setup, versions, predict, webhook],
    applies={"/health": _is_label_studio, "/predict": _is_json},
)
