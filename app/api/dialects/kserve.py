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
from app.api.admin import load_model, receive_parts, unload_model
from app.api.answering.responses import LargeResponse
from app.api.caller.check import require_key
from app.api.context import AnyRequest, context_of, header_of
from app.api.dependencies import Worker, WorkerPipeline, WorkerTritons
from app.api.dialects.dialect import Dialect, DialectParameters, OptionsByModel
from app.api.dialects.kserve_tensors import InferRequest, encode_response
from app.api.parameters.parse import check_model_name
from app.api.receiving.body import decode, parsing_bytes
from app.api.receiving.content_type import JSON
from app.api.receiving.intake import Receiving
from app.api.routes import ModelRoute, route_of
from app.errors import Forbidden, InvalidParameter, ModelNotReady, UnsupportedModel
from app.model.heads import ClassificationHead, EmbeddingHead
from app.model.reference import refer_to
from app.model.spec import InputFormat, ModelSpec
from app.pipeline.call import Reader, TaskOptions
from app.pipeline.results import Classifications, Embedding, TaskResult
from app.pipeline.tensors import run_tensor
from app.resilience.lease import Lease

_METHODS = {"config": "ModelConfig", "stats": "ModelStatistics"}
_LENGTH = b"inference-header-content-length"
_MODEL = "/v2/models/{model:str}"
_BOXES = [("num_dets", "INT32", [1]), ("det_boxes", "FP32", [-1, 4]), ("det_scores", "FP32", [-1]), ("det_classes", "INT32", [-1])]
_CLASSES = [("scores", "FP32", [-1]), ("classes", "INT32", [-1])]
_NAMES = ("class_names", "BYTES", [-1])
_EMBEDDING = "embedding"
_MAX_TEXT_BYTES = 1 << 16
_VERSION = _MODEL + "/versions/{version:int}"
# Work with less memory, and parsing a JSON object of this size, takes less than a millisecond.
_QUICK_BYTES = 99_999
# A number as JSON, and the objects from which it is made.
_NUMBER_BYTES = 64

T = TypeVar("T")
Model = FromPath[str]
Version = FromPath[int | None]


class _Options(OptionsByModel):
    __slots__ = ()

    def reader(self, spec: ModelSpec) -> Reader[TaskResult]:  # type: ignore[override]  # the answer is only described
        if isinstance(spec.head, EmbeddingHead | ClassificationHead):
            return TaskOptions[TaskResult](spec.head.task, self.model, self.confidence, self.max_detections).reader(spec)
        return super().reader(spec)


@ModelRoute([f"{_MODEL}/infer", f"{_VERSION}/infer"], key_in="query")
async def infer(
    request: AnyRequest, worker: Worker, pipeline: WorkerPipeline, model: Model, version: Version = None
) -> ASGIResponse:
    """Ask a model about one image, an element of type BYTES, as `/predict/{model}` does; or pass a tensor on to it."""
    context, length = context_of(request.scope), header_of(request.scope, _LENGTH)
    if not 0 < len(length) <= len(str(_QUICK_BYTES)):
        context.content_type = JSON  # whatever was declared, if anything: `receive` parses it in a thread
    in_path = [("model", model), *([("version", str(version))] if version else [])]
    parse = lambda data, *_: InferRequest.parse(data, length)  # noqa: E731

    async def run(work: Callable[[], T], nbytes: int) -> T:
        """Run work that needs this much memory, in a thread if it is much."""
        if nbytes <= _QUICK_BYTES:
            return work()
        return await pipeline.threads.run(work, call.deadline, lease, turn=call.turn(nbytes))

    async with Receiving(request, worker, DialectParameters, parse, in_path) as (_, given, wanted, call):
        memory = pipeline.admission.memory.reserve(call.caller, "this tensor")
        with Lease() as lease:
            lease.on_release(memory.release)
            size = len(given.content)
            try:
                if isinstance(given.content, bytes):
                    _, confidence, iou, limit = msgspec.structs.astuple(given.chosen)
                    options = _Options(model, confidence, None, limit, iou, version=wanted.version, lowers_iou=True, masks="none")
                    found = await pipeline.run(given.content, options, call)
                    spec, used, outputs = found.spec, found.version, _to_outputs(found, is_batch=len(given.declared[2]) > 1)
                else:
                    memory.add(size + parsing_bytes(size, context.content_type))
                    per_number = 0 if isinstance(given.content, memoryview) else _NUMBER_BYTES
                    read = lambda dtype, count: run(partial(given.read_numbers, dtype, count), count * per_number)  # noqa: E731
                    spec, (outputs, used) = await run_tensor(pipeline, model, wanted.version, given.declared, read, call)
            finally:
                context.log_fields |= pipeline.log_fields(model)
            if "route_name" in context.log_fields:
                context.log_fields["model"] = refer_to(spec.name, used)
            is_binary = given.choose(outputs)
            size = sum(
                outputs[name].size * (outputs[name].itemsize if binary else _NUMBER_BYTES) for name, binary in is_binary.items()
            )
            memory.add(size)
            head = {"model_name": spec.name, "model_version": used, **given.id}
            body, json_bytes = await run(partial(encode_response, head, outputs, is_binary), size)
            headers = [(_LENGTH, b"%d" % json_bytes)] if json_bytes else []
            return LargeResponse(body, "application/octet-stream" if json_bytes else JSON, pipeline.admission.memory, headers)


def _to_outputs(found: TaskResult, *, is_batch: bool) -> dict[str, NDArray[Any]]:
    """Return the output tensors for one image, with a first dimension of 1 if the input has one; boxes in pixels."""
    outputs: dict[str, NDArray[Any]]
    if isinstance(found, Embedding):
        outputs = {_EMBEDDING: found.vector}
    else:
        if isinstance(found, Classifications):
            outputs = {"scores": found.scores, "classes": found.class_ids}
        else:
            count = np.array([len(found.scores)], np.int32)
            outputs = {"num_dets": count, "det_boxes": found.boxes, "det_scores": found.scores, "det_classes": found.class_ids}
        outputs["class_names"] = np.array([found.spec.class_name(id_) for id_ in found.class_ids.tolist()], object)
    return {name: tensor[None] if is_batch else tensor for name, tensor in outputs.items()}


@get("/v2")
async def server(request: AnyRequest, worker: Worker) -> dict[str, Any]:
    """Describe the server."""
    require_key(request, worker.keys, "detect", is_dialect=True)
    extensions = ["binary_tensor_data", "model_configuration", "model_repository", "statistics"]
    return {"name": "nereid", "version": __version__, "extensions": extensions}


@get(["/v2/health/live", "/v2/health/ready"])
async def health(request: AnyRequest, worker: Worker) -> dict[str, bool]:
    """Liveness probe and readiness probe, as `/livez` and `/readyz`."""
    state = route_of(request.scope).rpartition("/")[2]
    if state == "ready" and not await worker.is_ready():
        raise ModelNotReady("the service is not ready")
    return {state: True}


@get([f"{path}{end}" for path in (_MODEL, _VERSION) for end in ("", "/ready", "/config", "/stats")])
async def describe(  # noqa: PLR0913, PLR0917 - the dependencies and the path
    request: AnyRequest,
    worker: Worker,
    triton_client: WorkerTritons,
    pipeline: WorkerPipeline,
    model: Model,
    version: Version = None,
) -> Any:  # noqa: ANN401 - of any members
    """Describe the tensors, the state, the config or the statistics of a model as a Triton does."""
    end = route_of(request.scope).rpartition("/")[2]
    require_key(request, worker.keys, "health" if end == "stats" else "detect", is_dialect=True)  # all callers' statistics
    check_model_name(model)
    reference, spec = pipeline.refer_to(model, version), None
    with suppress(UnsupportedModel):  # Triton can describe it nevertheless
        spec = await pipeline.spec(reference)
    if end == "ready":
        if not await triton_client.is_ready(reference):
            raise ModelNotReady("the model is not ready")
        return {"name": model, "ready": True}
    answer = await triton_client.describe(_METHODS.get(end, "ModelMetadata"), reference)
    if end in _METHODS or spec is None:
        return answer.get("config", answer)
    batch = [-1] * spec.has_batch_dimension
    if spec.shapes:  # a tensor of a caller is a square
        answer["inputs"][0]["shape"] = [*batch, *spec.image_shape]
    if spec.input_format is InputFormat.FILE:
        outputs = [*(_CLASSES if isinstance(spec.head, ClassificationHead) else _BOXES), _NAMES]
        if isinstance(spec.head, EmbeddingHead):
            outputs = [(_EMBEDDING, "FP32", [spec.head.dimensions])]
        answer["outputs"] = [{"name": name, "datatype": kind, "shape": batch + dims} for name, kind, dims in outputs]
    return answer


@post("/v2/repository/index", status_code=200)
async def index(request: AnyRequest, worker: Worker, triton_client: WorkerTritons) -> list[dict[str, str]]:
    """List the models in the repositories of all Tritons."""
    require_key(request, worker.keys, "detect", is_dialect=True)
    only_ready = (await _read_object(request)).get("ready") is True
    return [
        {"name": name, "version": version, "state": state.state, "reason": state.reason}
        for name, state in sorted((await triton_client.list_models()).items())
        if state.is_ready or not only_ready
        for version in sorted(state.versions) or [""]
    ]


@post([f"/v2/repository/models/{{model:str}}/{action}" for action in ("load", "unload")], status_code=200, guards=load_model.guards)
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
    body = b"".join([part async for part in receive_parts(request, _MAX_TEXT_BYTES)])
    context_of(request.scope).is_body_received = True
    return decode(memoryview(body or b"{}"), dict[str, Any], "expected a JSON object, or nothing")


DIALECT = Dialect("kserve", [infer, server, health, describe, index, control])
