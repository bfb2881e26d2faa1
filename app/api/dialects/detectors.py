"""The detectors that dialects list and use."""

from app.api.caller.check import require_key
from app.api.dependencies import WorkerResources
from app.api.dialects.dialect import AnyRequest
from app.errors import GatewayError
from app.model.heads import DetectionHead
from app.model.spec import ModelSpec
from app.pipeline.call import CallContext


async def detectors(request: AnyRequest, worker: WorkerResources) -> list[ModelSpec]:
    """Return the available detectors, sorted by name, after checking the caller's key.

    Raises:
        GatewayError: The API key is missing or wrong; Triton does not answer.
    """
    require_key(request, worker.keys, "detect", is_dialect=True)
    states = await worker.tritons.list_models()
    specs = [await _spec(worker, name) for name in sorted(states) if states[name].is_ready]
    return [spec for spec in specs if spec is not None and spec.head.task == DetectionHead.task]


async def find_detector(worker: WorkerResources, name: str | None, version: int | None, call: CallContext) -> ModelSpec:
    """Return a detector: the default one if `name` is None, the newest version if `version` is None.

    Raises:
        GatewayError: The detector does not exist or cannot be used.
    """
    pipeline = worker.pipeline
    spec = await pipeline.prepare(pipeline.refer_to(name or pipeline.default_for(DetectionHead.task), version), call.deadline)
    spec.expect_head(DetectionHead)
    return spec


async def _spec(worker: WorkerResources, name: str) -> ModelSpec | None:
    """Return the spec of a model; None if it cannot be used (`/models` reports the reason)."""
    try:
        return await worker.pipeline.spec(name)
    except GatewayError:
        return None
