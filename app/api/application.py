"""The HTTP application: routes, dependencies, error handlers and middleware put together."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from litestar import Litestar, Router
from litestar.types import ASGIApp

from app.api import docs, problems
from app.api.dependencies import WorkerResources, providers
from app.api.detect import detect, predict
from app.api.health import health, livez, readyz
from app.api.middleware import RequestContextMiddleware
from app.api.models import models
from app.pipeline.detector import Detector
from app.triton.client import TritonClient

Application = ASGIApp
OpenResources = Callable[[], AbstractAsyncContextManager[tuple[TritonClient, Detector]]]
"""Opens the Triton client and the detector of a worker, and closes them after the last request."""


def build(open_resources: OpenResources, max_body_bytes: int) -> Application:
    """Build the application of one worker.

    Args:
        open_resources: Opens what its handlers share. The lifespan can run only once, because dependencies are cached.
        max_body_bytes: Maximum size of a request body.
    """
    resources = WorkerResources()

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        if hasattr(resources, "detector"):
            raise RuntimeError("this application was started before; build another one")
        async with open_resources() as (resources.triton, resources.detector):
            yield

    handlers = [detect, predict, models, health, livez, readyz]
    app = Litestar(
        route_handlers=[*handlers, Router("/v1", route_handlers=handlers, include_in_schema=False), docs.docs_asset],
        dependencies=providers(resources),
        exception_handlers=problems.handlers(),
        lifespan=[lifespan],
        request_max_body_size=max_body_bytes,
        openapi_config=docs.config(),
        logging_config=None,
    )
    return RequestContextMiddleware(app)
