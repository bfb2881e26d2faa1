"""Dependencies that are injected into handlers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import msgspec
from litestar.connection import ASGIConnection
from litestar.di import NamedDependency, Provide

from app.api.caller.client_address import Proxies
from app.api.caller.keys import ApiKeys
from app.api.context import BodyLimits, RequestContext
from app.cascade.catalog import FILE as CASCADES
from app.cascade.catalog import Catalog
from app.embedded.folder import Device
from app.pipeline.pipeline import Pipeline
from app.telemetry.metrics import Metrics
from app.triton.pool import TritonPool


class LimitsInForce(msgspec.Struct, frozen=True):
    """Limits of the gateway. Byte sizes are in MiB, image sizes in megapixels, times in seconds."""

    max_file_size_mb: float
    max_batch_size_mb: float
    max_megapixels: float
    max_megapixels_non_jpeg: float
    max_uploads: int
    memory_mb: float
    timeout_seconds: float
    max_timeout_seconds: float
    requests: dict[str, int] = {}


class Deployment(NamedTuple):
    """The settings that the HTTP layer uses."""

    body_limits: BodyLimits
    batch_limits: BodyLimits
    limits: LimitsInForce
    triton_metrics_urls: tuple[str, ...]
    slow_request_ms: float
    trusted_proxies: Proxies
    has_page: bool = True
    dialects: Sequence[str] = ()
    allowed_origins: Sequence[str] = ()
    workers: int = 1
    model_repository: Path = Path()
    has_faces: bool = False
    is_search_alone: bool = False
    """Whether the routes of search, health and metrics are the only ones."""
    is_beside: bool = False
    """Whether workers alone ask this process, by a private socket, and pass requests of search on to it."""
    keeps_thumbnails: bool = False
    read_device: Callable[[], Device | None] = lambda: None
    """Returns what runs the models of the embedded Triton; None if it was stopped, or with a Triton elsewhere."""
    port: int = 0
    """TCP port that clients connect to; 0: a unix socket."""


class SearchState(Protocol):
    """Search: itself, or the process beside as workers see it."""

    async def why_unusable(self) -> str | None:
        """Return why search does not work, None if it does."""

    @property
    def is_read_only(self) -> bool:
        """Whether the database took no images when `why_unusable` last asked."""


class WorkerResources:
    """Resources that are shared in one worker. The application's lifespan sets them: gRPC needs the running event loop."""

    tritons: TritonPool
    pipeline: Pipeline
    metrics: Metrics
    search: SearchState | None = None
    is_draining = closes_connections = False

    def __init__(self, deployment: Deployment, keys: ApiKeys | None = None) -> None:
        self.deployment = deployment
        self.catalog = Catalog(deployment.model_repository / CASCADES)
        self.keys = keys
        self.client_ports: dict[RequestContext, str] = {}
        """The client's port of each request in progress."""

    def __deepcopy__(self, _: object) -> Self:
        return self  # Litestar copies guards, with the resources that are bound to them

    async def is_ready(self) -> bool:
        """Return whether the default model is ready, the worker is not about to stop, and search alone has its database."""
        if self.is_draining or (self.deployment.is_search_alone and (await self.why_no_search()) is not None):
            return False
        return await self.tritons.is_ready(await self.pipeline.read_default_reference())

    async def why_no_search(self) -> str | None:
        """Return why search does not work; None if it does, or is off."""
        return None if self.search is None else await self.search.why_unusable()

    def drain(self) -> None:
        """Mark the worker as about to stop with the server."""
        self.is_draining = self.closes_connections = True

    def leave_to_successor(self) -> None:
        """Mark the worker as about to stop while another one serves in its place."""
        self.closes_connections = True


Worker = NamedDependency[WorkerResources]
WorkerTritons = NamedDependency[TritonPool]
WorkerPipeline = NamedDependency[Pipeline]


def worker_of(connection: ASGIConnection[Any, Any, Any, Any]) -> WorkerResources:
    """Return the resources in the state of the application, for guards, into which nothing is injected."""
    worker: WorkerResources = connection.app.state["worker"]
    return worker


def _triton_client(worker: Worker) -> TritonPool:
    return worker.tritons


def _pipeline(worker: Worker) -> Pipeline:
    return worker.pipeline


def providers(resources: WorkerResources) -> dict[str, Provide]:
    """Return the dependencies of one application by parameter name.

    The others depend on `worker`, because for each request Litestar starts a task group for those that are independent.
    """
    return {
        "worker": Provide(lambda: resources, use_cache=True, sync_to_thread=False),
        "triton_client": Provide(_triton_client, use_cache=True, sync_to_thread=False),
        "pipeline": Provide(_pipeline, use_cache=True, sync_to_thread=False),
    }
