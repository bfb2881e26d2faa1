"""List the detectors to clients of a dialect."""

from app.api.dependencies import WorkerResources
from app.api.dialects.dialect import AnyRequest
from app.api.dialects.key import require_key
from app.errors import GatewayError
from app.model.heads import DetectionHead
from app.model.spec import ModelSpec


async def detectors(request: AnyRequest, worker: WorkerResources, key: str | None = None) -> list[ModelSpec]:
    """Return the detectors that can be used, by name, to a caller who may use them; `key` is that in the body, if any.

    Raises:
        GatewayError: The API key is missing or wrong; Triton does not answer.
    """
    require_key(request, worker, key)
    states = await worker.tritons.list_models()
    specs = [await _spec(worker, name) for name in sorted(states) if states[name].is_ready]
    return [spec for spec in specs if spec is not None and spec.head.task == DetectionHead.task]


async def _spec(worker: WorkerResources, name: str) -> ModelSpec | None:
    """Return the spec of a model; None if it cannot be used, as `/models` explains."""
    try:
        return await worker.pipeline.spec(name)
    except GatewayError:
        return None
