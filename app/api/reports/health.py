"""Liveness, readiness and a health report."""

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from typing import Literal, TypeVar, cast

import msgspec
from litestar import Response, get

from app import __version__
from app.api.context import AnyRequest, RequestContext, context_of
from app.api.dependencies import LimitsInForce, SearchState, Worker, WorkerPipeline, WorkerTritons
from app.api.documentation.openapi import describe
from app.api.routes import API_VERSION
from app.embedded.folder import Device
from app.errors import GatewayError
from app.host import cores, memory
from app.host.packages import has_pillow_simd
from app.model.reference import split_reference
from app.model.spec import ModelSpec
from app.pipeline.pipeline import Pipeline
from app.routing.router import Router
from app.triton.backend import TritonBackend
from app.triton.gpu import Gpu, read_gpus
from app.triton.pool import TritonPool

_STATES = ("ready", "not_ready", "unreachable")
_UNREACHABLE = "Triton unavailable"
"""Literally what clients of the system that this one follows look for."""
_READ_ONLY = "The database of search can only be read: no images are added"

T = TypeVar("T", bound=msgspec.Struct)


class ServerHealth(msgspec.Struct, frozen=True):
    """One of the Tritons."""

    address: str
    """`host:port` of its gRPC endpoint."""
    status: Literal["ready", "not_ready", "unreachable"]
    version: str | None
    transport: Literal["shm", "inline"]
    left_out: list[str]
    """Models for which the answering worker currently avoids this Triton, because their inferences fail or are wrong."""
    wrong: list[str]
    """Those of them that it answers for, but wrongly: see the golden picture."""
    share: float
    """Share, 0 to 1, of the images that the answering worker sent to it in the last seconds; 0 if none were sent."""


class GpuDevice(msgspec.Struct, frozen=True):
    """A GPU: its id if Triton sees it, or else its name; unreported values are null."""

    id: str
    utilization: float | None
    memory_used_mb: float | None
    memory_total_mb: float | None


class GpuHealth(msgspec.Struct, frozen=True):
    """Whether the default model runs on a GPU, and all GPUs that Triton sees, or that the embedded Triton uses."""

    in_use: bool
    provider: Literal["CUDAExecutionProvider", "CPUExecutionProvider"] | None
    """With what ONNX Runtime runs the models of the embedded Triton; null if it was stopped, or with a Triton elsewhere."""
    devices: list[GpuDevice]


class SearchHealth(msgspec.Struct, frozen=True):
    """Whether the process of search and its database answer, and why not; or that the database can only be read."""

    status: Literal["healthy", "unhealthy"]
    detail: str | None


class Health(msgspec.Struct, frozen=True):
    """State of the gateway, Triton and the default model. The HTTP status is 503 when no detection is possible."""

    status: Literal["healthy", "unhealthy"]
    version: str
    api: Literal["healthy"]
    triton: Literal["healthy", "unhealthy"]
    detail: str | None
    tritons: list[ServerHealth]
    model: str
    gpu: GpuHealth
    memory: dict[Literal["workers_mb"], list[float]]
    performance: dict[Literal["memory_mb", "optimizations"], float | dict[str, str]]
    limits: LimitsInForce
    workers: dict[Literal["running", "wanted"], int]
    refused_files: list[str]
    """Files (such as `api_keys` and `triton_tls`) that are not valid now: their last valid content is in use."""
    failing_models: dict[str, int]
    """Models that Triton fails to run, also those that it calls ready: how many workers reject requests for each."""
    model_deaths: dict[str, int]
    """Calls and probes since the start that have found that a process of the model had died. Triton calls such a model ready."""
    search: SearchHealth | None
    withdrawn_canaries: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """By route, why its canary gets no requests any more; absent if there is no file of routes."""


class State(msgspec.Struct, frozen=True):
    """Whether the process responds, or whether the default model is ready."""

    status: Literal["alive", "ready", "not_ready"]


class ReadinessReport(msgspec.Struct, frozen=True):
    """Whether the default model is ready, and the services it depends on."""

    status: Literal["ready", "not_ready"]
    version: str
    api_version: str
    services: dict[Literal["triton", "search"], dict[Literal["ok", "detail", "url"], bool | str]]
    """Whether any Triton responds, with `host:port` of the gRPC endpoints, separated by commas; and the database of search."""
    resources: dict[Literal["memory_mb", "cpu_percent"], float]
    """Of the answering worker; percent of one core, averaged since the worker started."""


def _respond(report: T, *, is_ready: bool) -> Response[T]:
    return Response(report) if is_ready else Response(report, status_code=503, headers={"Retry-After": "1"})


@get(["/livez", "/live"], summary="The process answers")
async def livez() -> State:
    """Liveness probe: 200 while the process handles requests."""
    return State("alive")


@get(
    "/livez/triton",
    summary="A restart of Triton is not needed",
    responses=describe(503, State, "The default model's answers have become wrong"),
)
async def livez_of_triton(worker: Worker) -> Response[State]:
    """Liveness probe of a Triton beside the gateway: 503 while the default model has become wrong there, or lost a process."""
    model = await worker.pipeline.read_default_reference()
    counted = {**worker.metrics.nonzero(worker.metrics.wrong_answers), **worker.metrics.nonzero(worker.metrics.model_deaths)}
    is_sick = worker.tritons.is_wrong(model) and model in counted
    return _respond(State("not_ready" if is_sick else "alive"), is_ready=not is_sick)


@get("/readyz", summary="The default model is ready", responses=describe(503, State, "The default model is not ready"))
async def readyz(worker: Worker) -> Response[State]:
    """Readiness probe: 200 while the default model is ready in Triton and its inferences succeed; 503 before a stop."""
    is_ready = await worker.is_ready()
    return _respond(State("ready" if is_ready else "not_ready"), is_ready=is_ready)


@get(
    "/ready",
    summary="The default model is ready, and on what that depends",
    responses=describe(503, ReadinessReport, "The default model is not ready"),
)
async def ready(
    request: AnyRequest, worker: Worker, triton_client: WorkerTritons, pipeline: WorkerPipeline
) -> Response[ReadinessReport]:
    """Report readiness, with the status code of `/readyz`, and the services it depends on."""
    context = context_of(request.scope)
    servers, _, no_search = await asyncio.gather(
        _examine_all(triton_client, await pipeline.read_default_reference()), _spec(pipeline, context), worker.why_no_search()
    )
    status = _best_status(servers)
    is_ready = not worker.is_draining and status == "ready" and not (worker.deployment.is_search_alone and no_search)
    reason = context.log_fields.get("detail") if status == "not_ready" else None
    url = ",".join(server.address for server in servers)
    report = ReadinessReport(
        "ready" if is_ready else "not_ready",
        __version__,
        API_VERSION,
        {
            "triton": {"ok": status != "unreachable", "detail": str(reason or status), "url": url},
            **({} if worker.search is None else {"search": {"ok": no_search is None, "detail": no_search or "ready"}}),
        },
        {"memory_mb": _to_mb(memory.resident_bytes()), "cpu_percent": round(cores.used_percent(), 1)},
    )
    return _respond(report, is_ready=is_ready)


@get("/health", summary="State of the gateway and of Triton", responses=describe(503, Health, "No detection is possible"))
async def health(request: AnyRequest, worker: Worker, triton_client: WorkerTritons, pipeline: WorkerPipeline) -> Response[Health]:
    """Report the state of the gateway, Triton and the default model."""
    metrics, context = worker.metrics, context_of(request.scope)
    gpus, servers, spec, no_search = await asyncio.gather(
        read_gpus(worker.deployment.triton_metrics_urls),
        _examine_all(triton_client, await pipeline.read_default_reference()),
        _spec(pipeline, context),
        worker.why_no_search(),
    )
    status = _best_status(servers)
    is_ready = status == "ready" and spec is not None
    if status == "unreachable":
        context.log_fields["detail"] = _UNREACHABLE
    elif status == "not_ready":
        model, _ = split_reference(pipeline.default_reference)
        context.log_fields.setdefault("detail", f"{model} is not ready in Triton, or its inferences fail")
    workers_mb = [_to_mb(number) for number in metrics.worker_memory.numbers()]
    report = Health(
        status="healthy" if is_ready else "unhealthy",
        version=__version__,
        api="healthy",
        triton="unhealthy" if status == "unreachable" else "healthy",
        detail=context.log_fields.get("detail"),
        tritons=servers,
        model=pipeline.default_model,
        gpu=_describe_gpus(spec, gpus, worker.deployment.read_device()),
        memory={"workers_mb": workers_mb},
        performance={"memory_mb": round(sum(workers_mb), 1), "optimizations": _optimizations()},
        limits=msgspec.structs.replace(worker.deployment.limits, requests=pipeline.admission.limits()),
        workers={"running": len(metrics.table.rows()), "wanted": worker.deployment.workers},
        refused_files=list(metrics.nonzero(metrics.refused_files)),
        failing_models=metrics.nonzero(metrics.circuit_open),
        model_deaths=metrics.nonzero(metrics.model_deaths),
        search=None if worker.search is None else _describe_search(worker.search, no_search),
        withdrawn_canaries=_withdrawn(cast("Router | None", pipeline.router)),
    )
    return _respond(report, is_ready=is_ready)


async def _spec(pipeline: Pipeline, context: RequestContext) -> ModelSpec | None:
    try:
        return await pipeline.spec(pipeline.default_reference)
    except GatewayError as error:
        context.log_fields["detail"] = error.detail
        return None


def _describe_search(search: SearchState, reason: str | None) -> SearchHealth:
    return SearchHealth("healthy" if reason is None else "unhealthy", reason or (_READ_ONLY if search.is_read_only else None))


def _withdrawn(router: Router | None) -> dict[str, str] | msgspec.UnsetType:
    if router is None:
        return msgspec.UNSET
    return {name: reason for name, route in router.routes.known.items() if (reason := router.canaries.withdrawn(name, route))}


def _describe_gpus(spec: ModelSpec | None, gpus: list[Gpu], device: Device | None) -> GpuHealth:
    if device is not None and device.gpu:
        gpus = [Gpu(device.gpu)]
    provider = None if device is None else device.provider
    return GpuHealth(spec is not None and spec.device == "gpu", provider, [_describe(gpu) for gpu in gpus])


def _describe(gpu: Gpu) -> GpuDevice:
    return GpuDevice(gpu.id, gpu.utilization, *(number and _to_mb(number) for number in gpu[2:]))


def _optimizations() -> dict[str, str]:
    return {
        "jpeg_decoder": "libjpeg-turbo",
        "classifier_resizer": "pillow-simd" if has_pillow_simd() else "pillow",
        "event_loop": type(asyncio.get_running_loop()).__module__.partition(".")[0],
        "json": "msgspec",
    }


def _to_mb(nbytes: int) -> float:
    return round(nbytes / 1e6, 1)


async def _examine_all(pool: TritonPool, model: str) -> list[ServerHealth]:
    sent = sum(server.recent_images for server in pool.servers)
    return list(await asyncio.gather(*(_examine(server, pool, model, sent) for server in pool.servers)))


def _best_status(servers: Sequence[ServerHealth]) -> str:
    return min((server.status for server in servers), key=_STATES.index, default=_STATES[-1])


async def _examine(server: TritonBackend, pool: TritonPool, model: str, sent: float) -> ServerHealth:
    async def ask_version() -> str | None:
        with suppress(GatewayError):
            return (await server.client.read_server()).version
        return None

    version, is_ready = await asyncio.gather(ask_version(), server.client.is_ready(model))
    is_ready = is_ready and server.is_usable(model)
    return ServerHealth(
        server.address,
        "ready" if is_ready else "unreachable" if version is None else "not_ready",
        version,
        "shm" if pool.transport.maps_memory(server.regions) else "inline",
        sorted(name for name, served in server.models.items() if not served.is_usable),
        sorted(name for name, served in server.models.items() if served.is_wrong),
        round(server.recent_images / sent, 3) if sent else 0.0,
    )
