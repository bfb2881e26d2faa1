"""The HTTP application: routes, dependencies, error handlers and middleware put together."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING

from litestar import Litestar, Router
from litestar.handlers import HTTPRouteHandler
from litestar.openapi.spec import Components, SecurityRequirement
from litestar.types import ASGIApp, ControllerRouterHandler

from app.api import docs, problems
from app.api.batch.route import detect_batch
from app.api.capacity import CapacityMiddleware
from app.api.dependencies import Deployment, WorkerResources, providers
from app.api.detect import classify, detect, predict
from app.api.dialects import routing
from app.api.guards import (
    Check,
    combine_guards,
    guard_batch_type,
    guard_body,
    guard_circuit,
    guard_key,
    guard_payload,
    guard_timing,
)
from app.api.head import HeadMiddleware
from app.api.health import health, live, livez, ready, readyz
from app.api.keys import ApiKeys, Scope
from app.api.metrics import metrics
from app.api.middleware import RequestContextMiddleware
from app.api.models import models
from app.api.openapi import KEY_SCHEMES
from app.api.page.routes import page_asset, root
from app.host.processes import DRAIN_SIGNAL
from app.pipeline.pipeline import Pipeline
from app.telemetry.metrics import Metrics
from app.triton.pool import TritonPool

if TYPE_CHECKING:  # it imports OpenTelemetry, which need not be installed
    from app.telemetry.tracing import Tracing

Application = ASGIApp
OpenResources = Callable[[], AbstractAsyncContextManager[tuple[TritonPool, Pipeline, Metrics]]]
"""Opens the pool of Tritons, the pipeline and the metrics of a worker, and closes them after the last request."""


def build(
    open_resources: OpenResources, deployment: Deployment, keys: ApiKeys | None = None, tracing: "Tracing | None" = None
) -> Application:
    """Build the application of one worker.

    Args:
        open_resources: Opens what its handlers share. The lifespan can run only once, because dependencies are cached.
        deployment: What the settings say.
        keys: The API keys, of which callers must have one; None if they need none.
        tracing: Makes the spans of each request; closed by its owner.
    """
    resources = WorkerResources(deployment, keys)

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        if hasattr(resources, "pipeline"):
            raise RuntimeError("this application was started before; build another one")
        async with open_resources() as (resources.tritons, resources.pipeline, resources.metrics):
            asyncio.get_running_loop().add_signal_handler(DRAIN_SIGNAL, resources.drain)
            yield

    guard_model = guard_circuit(resources)
    routes: list[ControllerRouterHandler] = [
        _protect(
            keys,
            "detect",
            [detect, classify, predict],
            guard_body(guard_model, guard_payload(deployment.body_limits), guard_timing),
        ),
        _protect(
            keys,
            "detect",
            [detect_batch],
            guard_body(guard_model, guard_payload(deployment.batch_limits), guard_batch_type, guard_timing),
        ),
        _protect(keys, "detect", [models]),
        _protect(keys, "health", [health, metrics, ready]),
        live,
        livez,
        readyz,
    ]
    dialects = routing.load(deployment.dialects)
    app = Litestar(
        route_handlers=[
            *routes,
            Router("/v1", route_handlers=routes, include_in_schema=False),
            docs.docs_asset,
            root,
            *([page_asset] if deployment.has_page else []),
            *map(routing.to_router, dialects),
        ],
        dependencies=providers(resources),
        exception_handlers=problems.handlers(routing.error_writer(dialects)),
        lifespan=[lifespan],
        openapi_config=docs.config(Components(security_schemes=KEY_SCHEMES if keys else None)),
        logging_config=None,
    )
    dispatch = routing.DialectMiddleware(CapacityMiddleware(app, resources, keys), dialects)
    return RequestContextMiddleware(HeadMiddleware(dispatch), resources, tracing)


def _protect(keys: ApiKeys | None, scope: Scope, handlers: list[HTTPRouteHandler], *checks: Check) -> Router:
    """Put routes behind checks; the first one is that of the caller's key, if there are keys."""
    security: list[SecurityRequirement] = []
    if keys is not None:
        checks = guard_key(keys, scope), *checks
        security = [{name: [scope]} for name in KEY_SCHEMES]
    return Router("/", route_handlers=handlers, guards=[combine_guards(*checks)] if checks else [], security=security)
