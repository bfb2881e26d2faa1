"""GET /models, GET /models/{name}: the models in Triton, and those that can be pulled."""

import asyncio

import msgspec
from litestar import get
from litestar.params import FromPath

from app.api.answering.schema import CascadeInfo, ModelCard, ModelInfo, ModelList, StepInfo
from app.api.dependencies import Worker, WorkerPipeline
from app.api.documentation.openapi import PROBLEMS
from app.errors import GatewayError, UnknownModel, UnsupportedModel
from app.expected import suggestion
from app.model.heads import DetectionHead, PoseHead, TextRecognitionHead
from app.model.reference import split_reference
from app.pipeline.pipeline import Pipeline
from app.triton.config_file import Unloadable
from app.triton.server_info import ModelState


@get("/models", summary="List the models that can be used, and those that could be pulled", responses={503: PROBLEMS[503]})
async def models(worker: Worker, pipeline: WorkerPipeline) -> ModelList:
    """List the models in the repositories of all Tritons, those that `pull` can download, and the cascades."""
    listed = await list_models(pipeline)
    known = [(name, cascade) for name in worker.catalog.names() if (cascade := worker.catalog.own(name)) is not None]
    cascades = [
        CascadeInfo(name, cascade.title, [StepInfo(step, one.model, one.of) for step, one in cascade.steps.items()])
        for name, cascade in known
    ]
    return msgspec.structs.replace(listed, cascades=cascades)


@get(
    "/models/{model:str}",
    summary="Describe a model",
    responses={status: PROBLEMS[status] for status in (400, 404, 503)},
)
async def model(model: FromPath[str], pipeline: WorkerPipeline) -> ModelInfo:
    """Describe a model in the repositories of all Tritons, or one that `pull` can download."""
    return await describe_model(model, pipeline)


async def describe_model(name: str, pipeline: Pipeline) -> ModelInfo:
    """Describe a model; raise UnknownModel if there is none of this name."""
    listed = await list_models(pipeline)
    found = next((model for model in listed.models if model.name == name), None)
    if found is None:
        similar = suggestion(name, [model.name for model in listed.models]) or ";"
        raise UnknownModel(f"there is no model {name[:64]!r}{similar} GET /models lists those that exist")
    return found


async def list_models(pipeline: Pipeline) -> ModelList:
    """Describe the models in the repositories of all Tritons, and those that `pull` can download."""
    listed = await pipeline.tritons.list_models()
    loaded = {name for name, state in listed.items() if state.is_ready}
    unloadable = await asyncio.to_thread(pipeline.unloadable, loaded)
    states: dict[str, ModelState | None] = dict.fromkeys([*pipeline.pullable, *unloadable]) | listed
    described = [await _describe(pipeline, name, states[name], unloadable.get(name)) for name in sorted(states)]
    default, _ = split_reference(pipeline.default_reference)
    ready = sorted((model.name for model in described if model.state == "ready"), key=lambda name: name != default)
    return ModelList(pipeline.default_model, described, len(described), list(map(ModelCard, ready)))


async def _describe(pipeline: Pipeline, name: str, state: ModelState | None, fault: Unloadable | None) -> ModelInfo:
    if fault is not None:
        return ModelInfo(name, fault.state, detail=fault.reason)
    if state is None:
        return ModelInfo(name, "not_pulled", detail=pipeline.how_to_pull(name))
    status = state.state or "UNAVAILABLE"
    if not state.is_ready and pipeline.on_demand is not None and state.reason in {"", "unloaded"}:
        return ModelInfo(name, "not_loaded", detail="it is loaded at its first request", status=status)
    if not state.is_ready:
        return ModelInfo(name, "not_ready", detail="Triton has not loaded it; its log says why", status=status)
    try:
        spec = await pipeline.spec(name)
    except GatewayError as error:
        answers_nothing = isinstance(error, UnsupportedModel) and error.answers_nothing
        return ModelInfo(name, "unloadable" if answers_nothing else "ready", detail=error.detail, status=status)
    return ModelInfo(
        name,
        "ready",
        version=spec.version,
        versions=sorted(state.versions, key=lambda version: int(version) if version.isdecimal() else 0),
        width=spec.input_size[0],
        height=spec.input_size[1],
        shapes=list(spec.shapes),
        task=spec.head.task,
        output_format=spec.head.description,
        device=spec.device,
        classes=[] if isinstance(spec.head, TextRecognitionHead) else list(spec.labels),  # not its thousands of characters
        keypoints=list(spec.head.keypoint_names) if isinstance(spec.head, PoseHead) else [],
        source=spec.source,
        licence=spec.licence,
        detail=spec.doubt or None,
        status=status,
        backend=spec.backend,
        max_batch_size=spec.max_batch,
        has_labels=bool(spec.labels),
        num_classes=len(spec.labels) or None,
        input_shape=list(spec.image_shape),
        box_units=spec.box_units if isinstance(spec.head, DetectionHead) else None,
        checked=spec.is_checked,
    )
