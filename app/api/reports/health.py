"""Liveness, readiness and a health report."""

import asyncio
from typing import Any

import msgspec
from litestar import Request, Response, get
from litestar.di import NamedDependency
from litestar.openapi.datastructures import ResponseSpec

from app import __version__
from app.api.context import RequestContext, context_of
from app.api.dependencies import WorkerResources
from app.api.reports import server_health
from app.api.reports.health_schema import (
    GpuDevice,
    GpuHealth,
    Health,
    Liveness,
    Memory,
    Performance,
    Readiness,
    ReadinessReport,
    Resources,
    Services,
    TritonService,
    Workers,
)
from app.api.routes import API_VERSION
from app.errors import GatewayError
from app.host import cores, memory
from app.host.packages import has_pillow_simd
from app.model.spec import ModelSpec
from app.pipeline.pipeline import Pipeline
from app.triton.gpu import Gpu, read_gpus

_RETRY = {"Retry-After": "1"}
_NOT_READY = {503: ResponseSpec(Readiness, description="The default model is not ready", generate_examples=False)}
_REPORTED_NOT_READY = {503: ResponseSpec(ReadinessReport, description="The default model is not ready", generate_examples=False)}
_UNHEALTHY = {503: ResponseSpec(Health, description="No detection is possible", generate_examples=False)}


@get("/livez", summary="The process answers")
async def livez() -> Liveness:
    """Liveness probe: 200 while the process handles requests."""
    return Liveness("alive")


@get("/live", summary="The process answers, as `/livez`")
async def live() -> Liveness:
    """Liveness probe under another name."""
    return Liveness("alive")


@get("/readyz", summary="The default model is ready", responses=_NOT_READY)
async def readyz(worker: NamedDependency[WorkerResources]) -> Response[Readiness]:
    """Readiness probe: 200 while the default model is ready in Triton and its inferences succeed; 503 before a stop."""
    if await worker.is_ready():
        return Response(Readiness("ready"))
    return Response(Readiness("not_ready"), status_code=503, headers=_RETRY)


@get("/ready", summary="The default model is ready, and on what that depends", responses=_REPORTED_NOT_READY)
async def ready(request: Request[Any, Any, Any], worker: NamedDependency[WorkerResources]) -> Response[ReadinessReport]:
    """Report readiness, with the status code of `/readyz`, and the services it depends on."""
    context = context_of(request.scope)
    servers, _ = await asyncio.gather(
        server_health.examine(worker.tritons, worker.pipeline.default_model), _spec(worker.pipeline, context)
    )
    status = server_health.best_status(servers)
    is_ready = not worker.is_draining and status == "ready"
    reason = context.log_fields.get("detail") if status == "not_ready" else None
    triton = TritonService(status != "unreachable", str(reason or status), ",".join(server.address for server in servers))
    report = ReadinessReport(
        "ready" if is_ready else "not_ready",
        __version__,
        API_VERSION,
        Services(triton),
        Resources(_to_mb(memory.resident_bytes()), round(cores.used_percent(), 1)),
    )
    return Response(report, status_code=200 if is_ready else 503, headers={} if is_ready else _RETRY)


@get("/health", summary="State of the gateway and of Triton", responses=_UNHEALTHY)
async def health(request: Request[Any, Any, Any], worker: NamedDependency[WorkerResources]) -> Response[Health]:
    """Report the state of the gateway, Triton and the default model."""
    pipeline, metrics, context = worker.pipeline, worker.metrics, context_of(request.scope)
    gpus, servers, spec = await asyncio.gather(
        read_gpus(worker.deployment.triton_metrics_urls),
        server_health.examine(worker.tritons, pipeline.default_model),
        _spec(pipeline, context),
    )
    status = server_health.best_status(servers)
    is_ready = status == "ready" and spec is not None
    workers_mb = [_to_mb(number) for number in metrics.worker_memory.numbers()]
    report = Health(
        status="healthy" if is_ready else "unhealthy",
        version=__version__,
        api="healthy",
        triton="unhealthy" if status == "unreachable" else "healthy",
        detail=context.log_fields.get("detail"),
        tritons=servers,
        model=pipeline.default_model,
        gpu=GpuHealth(spec is not None and spec.device == "gpu", [_describe(gpu) for gpu in gpus]),
        memory=Memory(workers_mb),
        performance=Performance(round(sum(workers_mb), 1), _optimizations()),
        limits=msgspec.structs.replace(worker.deployment.limits, requests=pipeline.admission.limits()),
        workers=Workers(len(metrics.table.rows()), worker.deployment.workers),
        refused_files=list(metrics.nonzero(metrics.refused_files)),
        failing_models=metrics.nonzero(metrics.circuit_open),
        model_deaths=metrics.nonzero(metrics.model_deaths),
    )
    return Response(report, status_code=200 if is_ready else 503, headers={} if is_ready else _RETRY)


async def _spec(pipeline: Pipeline, context: RequestContext) -> ModelSpec | None:
    """Return the spec of the default model; None if it cannot be used, with the reason in the log."""
    try:
        return await pipeline.spec(pipeline.default_model)
    except GatewayError as error:
        context.log_fields["detail"] = error.detail
        return None


def _describe(gpu: Gpu) -> GpuDevice:
    used, total = gpu.memory_used_bytes, gpu.memory_total_bytes
    return GpuDevice(gpu.id, gpu.utilization, None if used is None else _to_mb(used), None if total is None else _to_mb(total))


def _optimizations() -> dict[str, bool | str]:
    return {
        "jpeg_decoder": "libjpeg-turbo",
        "pillow_simd": has_pillow_simd(),
        "event_loop": type(asyncio.get_running_loop()).__module__.partition(".")[0],
        "json": "msgspec",
    }


def _to_mb(nbytes: int) -> float:
    return round(nbytes / 1e6, 1)
