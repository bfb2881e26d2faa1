"""Liveness, readiness and a health report."""

from typing import Any

from litestar import Request, Response, get
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec

from app import __version__
from app.api.context import context_of
from app.api.dependencies import WorkerResources
from app.api.schema import Health, Liveness, Memory, Performance, Readiness, TritonHealth
from app.errors import GatewayError
from app.host import memory
from app.host.packages import has_pillow_simd
from app.pipeline.detector import Detector
from app.triton.client import TritonClient

_RETRY = {"Retry-After": "1"}
_NOT_READY = {503: ResponseSpec(Readiness, description="The default model is not ready", generate_examples=False)}
_UNHEALTHY = {503: ResponseSpec(Health, description="No detection is possible", generate_examples=False)}


@get("/livez", summary="The process answers")
async def livez() -> Liveness:
    """Liveness probe: 200 while the process handles requests."""
    return Liveness("alive")


@get("/readyz", summary="The default model is ready", responses=_NOT_READY)
async def readyz(worker: NamedDependency[WorkerResources]) -> Response[Readiness]:
    """Readiness probe: 200 while the default model is ready in Triton, and its inferences do not fail; 503 before a stop."""
    if not worker.is_draining and await _is_ready(worker.triton, worker.detector):
        return Response(Readiness("ready"))
    return Response(Readiness("not_ready"), status_code=503, headers=_RETRY)


@get("/health", summary="State of the gateway and of Triton", responses=_UNHEALTHY)
async def health(
    request: Request[Any, Any, Any], triton: NamedDependency[TritonClient], detector: NamedDependency[Detector]
) -> Response[Health]:
    """Report the state of the gateway, Triton and the default model."""
    gpu = is_ready = False
    triton_health = TritonHealth("unreachable")
    try:
        triton_health = TritonHealth("not_ready", (await triton.read_server()).version)
        gpu = (await detector.spec(detector.default_model)).device == "gpu"
        is_ready = await _is_ready(triton, detector)
    except GatewayError as error:
        context_of(request.scope).log_fields["detail"] = error.detail
    if is_ready:
        triton_health = TritonHealth("ready", triton_health.version)
    rss_mb = round(memory.resident_bytes() / 1e6, 1)
    report = Health(
        status="healthy" if is_ready else "unhealthy",
        version=__version__,
        api="healthy",
        triton=triton_health,
        model=detector.default_model,
        model_ready=is_ready,
        gpu=gpu,
        memory=Memory(rss_mb),
        performance=Performance(
            memory_mb=rss_mb,
            optimizations={"pillow_simd": has_pillow_simd(), "transport": detector.transport_mode},
        ),
    )
    return Response(report, status_code=200 if is_ready else 503, headers={} if is_ready else _RETRY)


async def _is_ready(triton: TritonClient, detector: Detector) -> bool:
    return detector.is_circuit_closed(detector.default_model) and await triton.is_ready(detector.default_model)
