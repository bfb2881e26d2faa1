"""The dialect of KServe v2, the Open Inference Protocol over HTTP: a model gets an image, or a tensor as it declares it.

Source: docs/predict-api/v2/required_api.md of kserve/kserve; docs/protocol of triton-inference-server/server.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any, TypeVar

import msgspec
import numpy as np
from litestar import Response, get, post
from litestar.params import FromPath
from litestar.response.base import ASGIResponse
from numpy.typing import NDArray

from app import __version__
from app.api.admin import load_model, unload_model
from app.api.answering.responses import LargeResponse
from app.api.caller.check import require_key
from app.api.context import context_of, header_of
from app.api.dependencies import Worker
from app.api.dialects.dialect import AnyRequest, Dialect, DialectParameters, OptionsByModel
from app.api.dialects.kserve_tensors import BYTES, MAX_HEAD_BYTES, encode_response, parse_request
from app.api.parameters.parse import check_model_name
from app.api.receiving import intake
from app.api.receiving.body import JSON_ERRORS, ParsedBody, parsing_bytes
from app.api.receiving.client_watch import ClientWatch
from app.api.receiving.content_type import JSON
from app.api.routes import ModelRoute, route_of
from app.errors import Forbidden, InvalidParameter, MalformedRequest, ModelNotReady, UnsupportedModel
from app.model.heads import ClassificationHead
from app.model.spec import InputFormat, ModelSpec
from app.pipeline.call import ClassifyOptions, Detections, Reader, TaskResult
from app.pipeline.tensors import TensorRequest
from app.resilience.lease import Lease

_EXTENSIONS = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]
_LENGTH = b"inference-header-content-length"
_MODEL = "/v2/models/{model:str}"
_VERSION = _MODEL + "/versions/{version:int}"
_MAX_TEXT_BYTES = 1 << 16
# Work on less takes less than a millisecond.
_QUICK_BYTES = 1 << 16
# A number as JSON, and the objects from which it is made.
_NUMBER_BYTES = 64

_METHODS = {"config": "ModelConfig", "stats": "ModelStatistics"}
_CLASSES = {"scores": ("FP32", [-1]), "classes": ("INT32", [-1])}
_BOXES = {"num_dets": ("INT32", [1]), "det_boxes": ("FP32", [-1, 4]), "det_scores": ("FP32", [-1]), "det_classes": ("INT32", [-1])}
_NAMES = {"class_names": (BYTES, [-1])}

_keep: Callable[[bytes, str, object], ParsedBody] = lambda data, *_: ParsedBody(data, [])  # noqa: E731

T = TypeVar("T")
Model = FromPath[str]
Version = FromPath[int | None]


class _Options(OptionsByModel):
    """Options for a model of any task."""

    __slots__ = ()

    def reader(self, spec: ModelSpec) -> Reader[TaskResult]:  # type: ignore[override]  # the answer is only described
        """Return the reader of detections without masks, or of classes."""
        if isinstance(spec.head, ClassificationHead):
            return ClassifyOptions(self.model, self.confidence, self.max_detections).reader(spec)
        return super().reader(spec)


@ModelRoute([f"{_MODEL}/infer", f"{_VERSION}/infer"], key_in="query")
async def infer(request: AnyRequest, worker: Worker, model: Model, version: Version = None) -> ASGIResponse:
    """Ask a model about one image, an element of type BYTES, as `/predict/{model}` does; or pass a tensor on to it."""
    context, pipeline = context_of(request.scope), worker.pipeline
    memory = pipeline.admission.memory.reserve(context.caller, "this tensor")

    async def run(work: Callable[[], T], nbytes: int) -> T:
        """Run work on this many bytes, in a thread if there are many."""
        if nbytes <= _QUICK_BYTES:
            return work()
        with Lease() as lease:
            return await pipeline.threads.run(work, call.deadline, lease, turn=call.turn())

    with ClientWatch(request.receive, context.body_limits) as client, memory:
        in_path = [("model", model), *([("version", str(version))] if version else [])]
        content, wanted, call = await intake.receive(client, request.scope, worker, in_path, DialectParameters, _keep)
        data, length = content.image, header_of(request.scope, _LENGTH)
        memory.add(len(data) if length else parsing_bytes(len(data), JSON))
        given = await run(partial(parse_request, data, length), MAX_HEAD_BYTES if length else len(data))
        tensor, chosen = given.tensor, given.document.parameters
        try:
            if tensor.datatype == BYTES:
                image = await run(given.read_file, len(tensor.data))
                options = _Options(wanted.model, chosen.confidence, None, chosen.max_detections, chosen.iou, version=wanted.version)
                found = await pipeline.run(image, options._replace(masks="none", lowers_iou=True), call)
                outputs, version_used = _to_outputs(found, is_batch=len(tensor.shape) > 1), found.version
                is_binary = given.choose(outputs)
            else:
                declared = tensor.name, tensor.datatype, tensor.shape
                asked = await TensorRequest.open(pipeline, model, wanted.version, declared, call)
                is_binary = given.choose(asked.spec.requested_names)
                read = partial(given.read_numbers, np.dtype(asked.spec.dtype), asked.elements)
                outputs, version_used = await asked.run(await run(read, len(tensor.data)))
        finally:
            if pipeline.is_known(model):
                context.log_fields["model"] = model
        size = sum(outputs[name].size * (outputs[name].itemsize if binary else _NUMBER_BYTES) for name, binary in is_binary.items())
        memory.add(size)
        id_ = {} if given.document.id is None else {"id": given.document.id}
        head = {"model_name": model, "model_version": version_used, **id_}
        body, json_bytes = await run(partial(encode_response, head, outputs, is_binary), size)
        headers = [(_LENGTH, b"%d" % json_bytes)] if json_bytes else []
        return LargeResponse(body, "application/octet-stream" if json_bytes else JSON, pipeline.admission.memory, headers)


def _to_outputs(found: TaskResult, *, is_batch: bool) -> dict[str, NDArray[Any]]:
    """Return the output tensors for one image, with a first dimension of 1 if the input has one; boxes in pixels."""
    names = np.array([found.spec.class_name(id_) for id_ in found.class_ids.tolist()], object)
    if isinstance(found, Detections):
        count = np.array([len(found.scores)], np.int32)
        outputs = {"num_dets": count, "det_boxes": found.boxes, "det_scores": found.scores, "det_classes": found.class_ids}
    else:
        outputs = {"scores": found.scores, "classes": found.class_ids}
    return {name: tensor[None] if is_batch else tensor for name, tensor in (outputs | {"class_names": names}).items()}


@get("/v2")
async def server(request: AnyRequest, worker: Worker) -> dict[str, Any]:
    """Describe the server."""
    require_key(request, worker.keys, "detect", is_dialect=True)
    return {"name": "nereid", "version": __version__, "extensions": _EXTENSIONS}


@get(["/v2/health/live", "/v2/health/ready"])
async def health(request: AnyRequest, worker: Worker) -> dict[str, bool]:
    """Liveness probe and readiness probe, as `/livez` and `/readyz`."""
    state = route_of(request.scope).rpartition("/")[2]
    if state == "ready" and not await worker.is_ready():
        raise ModelNotReady("the service is not ready")
    return {state: True}


@get([f"{path}{end}" for path in (_MODEL, _VERSION) for end in ("", "/ready", "/config", "/stats")])
async def describe(request: AnyRequest, worker: Worker, model: Model, version: Version = None) -> dict[str, Any]:
    """Describe the tensors, the state, the config or the statistics of a model as a Triton does.

    The outputs of a model that takes files are those for its image.
    """
    require_key(request, worker.keys, "detect", is_dialect=True)
    check_model_name(model)
    reference, end = worker.pipeline.refer_to(model, version), route_of(request.scope).rpartition("/")[2]
    spec = None
    with suppress(UnsupportedModel):  # Triton can describe it nevertheless
        spec = await worker.pipeline.spec(reference)
    if end == "ready":
        if not await worker.tritons.is_ready(reference):
            raise ModelNotReady("the model is not ready")
        return {"name": model, "ready": True}
    answer = await worker.tritons.describe(_METHODS.get(end, "ModelMetadata"), reference)
    if end not in _METHODS and spec is not None and spec.input_format is InputFormat.FILE:
        outputs = (_CLASSES if isinstance(spec.head, ClassificationHead) else _BOXES) | _NAMES
        batch = [-1] * spec.has_batch_dimension
        answer["outputs"] = [{"name": name, "datatype": kind, "shape": batch + dims} for name, (kind, dims) in outputs.items()]
    described: dict[str, Any] = answer.get("config", answer)
    return described


@post("/v2/repository/index", status_code=200, request_max_body_size=_MAX_TEXT_BYTES)
async def index(request: AnyRequest, worker: Worker) -> list[dict[str, str]]:
    """List the models in the repositories of all Tritons."""
    try:
        require_key(request, worker.keys, "detect", is_dialect=True)
    except Forbidden:
        require_key(request, worker.keys, "health", is_dialect=True)
    only_ready = (await _read_object(request)).get("ready") is True
    states = await worker.tritons.list_models()
    return [
        {"name": name, "version": version, "state": state.state, "reason": state.reason}
        for name, state in sorted(states.items())
        if state.is_ready or not only_ready
        for version in sorted(state.versions) or [""]
    ]


@post(
    ["/v2/repository/models/{model:str}/load", "/v2/repository/models/{model:str}/unload"],
    status_code=200,
    request_max_body_size=_MAX_TEXT_BYTES,
    guards=load_model.guards,
)
async def control(request: AnyRequest, worker: Worker, model: Model) -> Response[bytes]:
    """Let Triton load a model of the repository, or unload it."""
    command = load_model if request.scope["path"].endswith("/load") else unload_model
    if worker.keys is None:
        raise Forbidden("models are changed only by callers with an API key")
    require_key(request, worker.keys, "admin", is_dialect=True)
    parameters = (await _read_object(request)).get("parameters")
    if command is load_model and parameters:  # configs and files can run programs in Triton
        raise InvalidParameter("load takes no parameters: the config and the files are those of the repository")
    await command.fn(model=model, worker=worker)
    return Response(b"")


async def _read_object(request: AnyRequest) -> dict[str, Any]:
    """Return the JSON object in the body, which may be empty."""
    body = await request.body()
    context_of(request.scope).is_body_received = True
    try:
        return msgspec.json.decode(body or b"{}", type=dict[str, Any])
    except JSON_ERRORS as error:
        raise MalformedRequest("expected a JSON object, or nothing") from error


DIALECT = Dialect("kserve", [infer, server, health, describe, index, control])
