"""What handlers receive by dependency injection."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from litestar.di import NamedDependency, Provide

from app.api.admission.client_address import Proxies
from app.api.admission.keys import ApiKeys
from app.api.receiving.client_watch import BodyLimits
from app.api.reports.health_schema import LimitsInForce
from app.pipeline.pipeline import Pipeline
from app.telemetry.metrics import Metrics
from app.triton.pool import TritonPool


class Deployment(NamedTuple):
    """What the settings say of the way that an application runs."""

    body_limits: BodyLimits
    batch_limits: BodyLimits
    """Of requests with several images."""
    limits: LimitsInForce
    """For the report of health."""
    triton_metrics_urls: tuple[str, ...]
    """Of the Tritons, as far as they are known."""
    slow_request_ms: float
    """A request that takes longer is logged as a warning; 0: none is."""
    trusted_proxies: Proxies
    has_page: bool = True
    """Whether browsers get a page at `/`."""
    dialects: Mapping[str, Mapping[str, Any]] = MappingProxyType({})
    """The dialects in use, by name, and their own settings."""


class WorkerResources:
    """What handlers share within one worker. The application's lifespan sets it, because gRPC needs the running event loop."""

    tritons: TritonPool
    pipeline: Pipeline
    metrics: Metrics
    is_draining = False
    """Whether the worker is about to be stopped."""

    def __init__(self, deployment: Deployment, keys: ApiKeys | None = None) -> None:
        self.deployment = deployment
        self.keys = keys
        """The API keys, of which callers must have one; None if they need none."""

    async def is_ready(self) -> bool:
        """Return whether the default model can be used, and the worker is not about to be stopped."""
        return not self.is_draining and await self.tritons.is_ready(self.pipeline.default_model)

    def drain(self) -> None:
        """Note that the worker is about to be stopped."""
        self.is_draining = True


def providers(resources: WorkerResources) -> dict[str, Provide]:
    """Return the dependencies of one application, by parameter name; each is provided once and then cached."""

    def provide_triton_client() -> TritonPool:
        return resources.tritons

    def provide_pipeline(triton_client: NamedDependency[TritonPool]) -> Pipeline:
        assert resources.tritons is triton_client  # noqa: S101 - it was opened with them
        return resources.pipeline

    def provide_worker() -> WorkerResources:
        return resources

    return {
        "triton_client": Provide(provide_triton_client, use_cache=True, sync_to_thread=False),
        "pipeline": Provide(provide_pipeline, use_cache=True, sync_to_thread=False),
        "worker": Provide(provide_worker, use_cache=True, sync_to_thread=False),
    }
