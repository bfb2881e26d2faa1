"""Build the application from the settings. Granian calls `create_app` in every worker."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import msgspec
import structlog

from app import __version__, feature
from app.api import application, beside
from app.api.caller.keys import ApiKeys
from app.api.context import BodyLimits
from app.api.dependencies import Deployment, LimitsInForce
from app.embedded.folder import TritonFolder, device_of, has_gpu
from app.errors import GatewayError
from app.host import allocator, cores, memory
from app.host.processes import SEARCH_SOCKET, is_beside
from app.imaging.decode import max_request_bytes
from app.imaging.header import PixelLimits
from app.model.heads import TASKS
from app.pipeline import completion
from app.pipeline.limits import Limits
from app.pipeline.pipeline import Models, Pipeline
from app.pipeline.triton_calls import TritonCalls, calls_per_worker
from app.remote.fetcher import Fetcher
from app.resilience.admission import Admission, Capacity
from app.resilience.worker_table import WorkerTable
from app.routing.canary import CanaryWatch
from app.routing.router import Router
from app.routing.routes import Routes
from app.routing.shadow import Shadows
from app.settings.schema import SIZES, Settings
from app.settings.task_models import task_models
from app.telemetry import logging
from app.telemetry.metrics import Metrics
from app.triton import credentials
from app.triton.backend import TritonBackend
from app.triton.client import TritonClient
from app.triton.config_file import unloadable_models
from app.triton.credentials import Credentials
from app.triton.loading import ModelLoader
from app.triton.membership import Membership, Target
from app.triton.metrics import read_regularly
from app.triton.on_demand import ModelsOnDemand
from app.triton.pool import TritonPool
from app.triton.repository import last_change
from app.triton.specs import Completion
from app.triton.transport import Transport
from app.zoo import registry

if TYPE_CHECKING:
    from app.search.describe import SearchOptions
    from app.telemetry.tracing import Tracing

LOG = structlog.get_logger()

_HOUSEKEEPING_SECONDS = 1.0
# Other workers notice within two seconds that the one that searches beside them does not run.
_FOLLOWER_SECONDS = 0.25
# The embedded Triton runs most models on a CPU.
_SLOW_MS, _SLOW_EMBEDDED_MS = 100.0, 1000.0
# A little less than Frigate's default time-out; with the embedded Triton, it has to be longer.
_FRIGATE_SECONDS, _FRIGATE_EMBEDDED_SECONDS = 0.18, 0.95
# To the process of search: for each request, httpx compares all idle connections with all others.
_IDLE_CONNECTIONS = 32
# Memory for the bodies of anonymous requests, in addition to one body of maximum size.
_ANONYMOUS_BYTES = 64 << 20
# If a worker has grown by this factor and uses less than this for requests, it returns free memory to the kernel.
_QUIET_BYTES = 16 * 2**20
_GROWTH = 1.1


def create_app(settings: Settings | None = None) -> application.Application:
    """Build the application of one worker, by default with the settings in the environment."""
    allocator.keep_freed_memory()
    settings = settings or feature.read_settings()
    logging.configure(settings.log_level)
    settings = _fit_to_memory(settings)
    keys = ApiKeys(Path(settings.api_keys_file)) if settings.api_keys_file else None
    tracing = _open_tracing() if settings.tracing else None
    return application.build(
        partial(open_resources, settings, tracing), deployment_of(settings), keys, tracing, _search_of(settings)
    )


def _search_of(settings: Settings) -> application.OpenSearch | None:
    if settings.search == "off":
        return None
    if settings.search == "on":
        connections = httpx.Limits(max_keepalive_connections=_IDLE_CONNECTIONS)
        transport = httpx.AsyncHTTPTransport(uds=os.environ[SEARCH_SOCKET], limits=connections)
        limits = BodyLimits(settings.max_batch_bytes, settings.body_seconds)
        return lambda _, __, metrics: beside.open_process(transport, limits, metrics.table)
    from app.search.service import open_search  # noqa: PLC0415 - other workers need none of it

    return partial(open_search, _search_options(settings))


def _search_options(settings: Settings) -> "SearchOptions":
    from app.search.describe import SearchOptions  # noqa: PLC0415 - as above

    folders, excluded, max_bytes = settings.search_folder_paths, settings.search_excluded, settings.max_body_bytes
    workers = 1 if is_beside(settings.search) else cores.workers_of_host(settings.workers, settings.instances)
    connections = min(max(80 // workers, 2), 8)  # of all of them, PostgreSQL takes 100 by default, some of which others need
    kept = settings.search_thumbnails, settings.faces
    return SearchOptions(settings.search_database, folders, excluded, *kept, max_bytes, connections)


def _workers(settings: Settings) -> int:
    return cores.workers_of_host(settings.workers, settings.instances) + (settings.search == "on" or is_beside(settings.search))


def _open_tracing() -> "Tracing":
    # Imported here, because it takes time and memory, and OpenTelemetry is optional.
    from app.telemetry.tracing import Tracing  # noqa: PLC0415

    logging.forward("opentelemetry", silent="opentelemetry.util.re")  # it logs headers that it cannot parse
    return Tracing()


@asynccontextmanager
async def open_resources(
    settings: Settings, tracing: "Tracing | None" = None
) -> AsyncIterator[tuple[TritonPool, Pipeline, Metrics]]:
    """Open the pool of Tritons, the pipeline and the metrics of a worker; close them in reverse order, and then the tracing."""
    async with AsyncExitStack() as stack:
        stack.push_async_callback(asyncio.sleep, 0)  # an iteration of the event loop, which writes the last log lines
        table = WorkerTable(is_follower=is_beside(settings.search))
        stack.callback(table.close)
        metrics = Metrics(table, __version__, feature.instruments(table))
        metrics.worker_starts.add(1)
        metrics.workers_wanted.set(_workers(settings))
        is_started = asyncio.Event()
        seconds = _FOLLOWER_SECONDS if is_beside(settings.search) else _HOUSEKEEPING_SECONDS
        stack.push_async_callback(_cancel, asyncio.create_task(_beat(table, is_started, seconds)))
        if tracing is not None:
            stack.push_async_callback(tracing.close)
        transport = Transport(settings.transport)
        await transport.sweep()
        pool = TritonPool(transport)
        stack.push_async_callback(pool.close)
        tls = credentials.load(settings.triton_tls_folder)
        membership = Membership(pool, settings.triton_addresses, partial(_connect, settings, tls, table))
        await membership.refresh()
        stack.push_async_callback(_cancel, asyncio.create_task(membership.run()))
        stack.push_async_callback(transport.close)
        admission = Admission(table, _capacity(settings), pool.is_silent)
        limits = Limits(settings.decode_threads, _pixel_limits(settings), settings.timeout_seconds, settings.max_timeout_seconds)
        fetcher = Fetcher(settings.url_host_patterns, settings.max_body_bytes)
        stack.callback(fetcher.close)
        calls = TritonCalls(pool, metrics, partial(calls_per_worker, settings.calls_in_flight, table), settings.timeout_seconds)
        pipeline = Pipeline(calls, admission, _models(settings), limits, fetcher)
        stack.push_async_callback(pipeline.close)
        options = _add_options(settings, stack, pipeline, metrics)
        try:
            await pipeline.warm_up()
        except GatewayError as error:  # Triton may start later
            given = {"triton": ",".join(settings.triton_addresses), "code": error.code, "detail": error.detail}
            LOG.warning("the default model cannot be used yet", model=settings.model, **given)
        for work in (
            _keep_house(pipeline),
            read_regularly(pool, table, metrics),
            calls.examiner.run(pipeline.default_models),
            *options,
        ):
            stack.push_async_callback(_cancel, asyncio.create_task(work))
        pipeline.sample()
        is_started.set()
        await asyncio.sleep(0)  # run the first beat before the worker accepts requests
        # Exclude objects that live as long as the worker from garbage collection.
        gc.collect()
        gc.freeze()
        yield pool, pipeline, metrics


def _add_options(
    settings: Settings, stack: AsyncExitStack, pipeline: Pipeline, metrics: Metrics
) -> list[Coroutine[Any, Any, None]]:
    pool, table, works = pipeline.tritons, metrics.table, list[Coroutine[Any, Any, None]]()
    if settings.routes_file:
        routes, shadows = Routes(Path(settings.routes_file)), Shadows(pipeline, metrics)
        stack.push_async_callback(shadows.close)
        pipeline.router = Router(routes, pipeline, metrics, CanaryWatch(routes, metrics), shadows)
    if settings.loaded_models:
        models = Path(settings.model_repository) if settings.triton_endpoints else settings.triton_folder / "models"
        pipeline.on_demand = ModelsOnDemand(pool, table, models, settings.loaded_models, pipeline.default_models)
        stack.callback(pipeline.on_demand.close)
        works.append(pipeline.on_demand.run())
    if settings.triton_endpoints and settings.triton_loads_models:
        works.append(ModelLoader(pool, Path(settings.model_repository), pipeline.on_demand).run(table))
    if settings.frigate_zmq:
        from app.frigate.listener import Listener  # noqa: PLC0415 - for cameras of Frigate alone

        seconds = _FRIGATE_SECONDS if settings.triton_endpoints else _FRIGATE_EMBEDDED_SECONDS
        works.append(Listener(settings.frigate_zmq, pipeline, metrics, seconds).run())
    for _, each in feature.used(settings):
        works += each.open(settings, pipeline, metrics, stack)
    return works


def _connect(settings: Settings, tls: Credentials | None, table: WorkerTable, target: Target) -> TritonBackend:
    if not settings.triton_endpoints:
        TritonFolder(settings).check()  # systemd removes it when its user logs out; then another user may make it
    client = TritonClient(
        target.address,
        settings.control_key_path,
        credentials=tls,
        host=target.host,
        ips=target.ips,
        has_gpu=partial(has_gpu, settings),
    )
    name_classes = partial(completion.name_classes, repository=Path(settings.model_repository))
    return TritonBackend(client, table, Completion(name_classes, completion.decide_units, settings.shapes == "square"))


def deployment_of(settings: Settings) -> Deployment:
    """Return the settings that the HTTP layer uses."""
    capacity = _capacity(settings)
    usual_slow_ms = _SLOW_MS if settings.triton_endpoints else _SLOW_EMBEDDED_MS
    return Deployment(
        BodyLimits(settings.max_body_bytes, settings.body_seconds),
        BodyLimits(settings.max_batch_bytes, settings.body_seconds),
        msgspec.convert(msgspec.structs.asdict(settings) | {"memory_mb": round(capacity.memory_bytes / 2**20, 1)}, LimitsInForce),
        settings.metrics_urls,
        usual_slow_ms if settings.slow_request_ms is None else settings.slow_request_ms,
        settings.trusted_networks,
        settings.page,
        settings.dialect_names,
        settings.allowed_origins,
        _workers(settings),
        Path(settings.model_repository),
        settings.faces,
        settings.search == "alone",
        is_beside(settings.search),
        settings.search_thumbnails,
        partial(device_of, settings),
        0 if settings.socket else settings.port,
    )


def _models(settings: Settings) -> Models:
    # Those that could be pulled are left out without a model repository that this user can read.
    repository = Path(settings.model_repository)
    known = registry.load() if os.access(repository, os.R_OK) else {}
    return Models(
        settings.model,
        {task: model for task in TASKS if (model := task_models(settings).get(task))},
        unloadable=partial(unloadable_models, repository, is_embedded=not settings.triton_endpoints),
        # Otherwise nobody here lets the Tritons load a changed model.
        last_change=int if settings.triton_endpoints and not settings.triton_loads_models else partial(last_change, repository),
        pullable={name: entry.group or name for name, entry in known.items()},
    )


def _pixel_limits(settings: Settings) -> PixelLimits:
    return PixelLimits(settings.max_pixels, settings.max_pixels_non_jpeg)


def _largest_request(settings: Settings) -> int:
    return max_request_bytes(_pixel_limits(settings), max(settings.max_body_bytes, settings.max_batch_bytes))


def _fit_to_memory(settings: Settings) -> Settings:
    """Lower the limits of images and bodies to what this host has memory for: the kernel would kill a worker for one picture."""
    fitting = settings.shrunk(memory.fraction_that_fits(_largest_request(settings), _workers(settings)))
    if fitting is not settings:
        limits = {name: getattr(fitting, name) for name in SIZES}
        LOG.warning("the limits of images and bodies are lower, because there is little memory", **limits)
    return fitting


def _capacity(settings: Settings) -> Capacity:
    budget = memory.image_budget(settings.memory_mb, _largest_request(settings))
    return Capacity(
        max_uploads=settings.max_uploads,
        upload_bytes=budget,
        memory_bytes=budget,
        max_requests=settings.max_requests,
        target_seconds=settings.timeout_seconds / 2,
        decode_threads=cores.workers_of_host(settings.workers, settings.instances) * settings.decode_threads,
        anonymous_bytes=settings.max_body_bytes + _ANONYMOUS_BYTES,
    )


async def _keep_house(pipeline: Pipeline) -> None:
    usual_bytes = memory.resident_bytes()
    while True:
        await asyncio.sleep(_HOUSEKEEPING_SECONDS)
        try:
            await pipeline.refresh()
            pipeline.sample()
            if pipeline.admission.own_bytes < _QUIET_BYTES and memory.resident_bytes() > _GROWTH * usual_bytes:
                allocator.return_freed_memory()
                usual_bytes = memory.resident_bytes()
        except Exception:
            LOG.exception("housekeeping failed")


async def _beat(table: WorkerTable, is_started: asyncio.Event, seconds: float) -> None:
    await is_started.wait()
    while True:
        table.beat()
        await asyncio.sleep(seconds)


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
