"""List the detectors to clients of a dialect."""

from app.api.admission.guards import require_key
from app.api.dependencies import WorkerResources
from app.api.dialects.dialect import AnyRequest
from app.errors import GatewayError
from app.model.heads import DetectionHead
from app.model.spec import ModelSpec
from app.pipeline.call import CallContext


async def detectors(request: AnyRequest, worker: WorkerResources) -> list[ModelSpec]:
    """Return the detectors that can be used, by name, to a caller who may use them.

    Raises:
        GatewayError: The API key is missing or wrong; Triton does not answer.
    """
    require_key(request, worker)
    states = await worker.tritons.list_models()
    specs = [await _spec(worker, name) for name in sorted(states) if states[name].is_ready]
    return [spec for spec in specs if spec is not None and spec.head.task == DetectionHead.task]


async def find_detector(worker: WorkerResources, name: str | None, version: int | None, call: CallContext) -> ModelSpec:
    """Return a detector: the default one without a name, the newest one without a version.

    Raises:
        GatewayError: There is no such detector, or it cannot be used.
    """
    pipeline = worker.pipeline
    spec = await pipeline.prepare(pipeline.refer_to(name or pipeline.default_for(DetectionHead.task), version), call.deadline)
    spec.expect_head(DetectionHead)
    return spec


async def _spec(worker: WorkerResources, name: str) -> ModelSpec | None:
    """Return the spec of a model; None if it cannot be used, as `/models` explains."""
    try:
        return await worker.pipeline.spec(name)
    except GatewayError:
        return None
