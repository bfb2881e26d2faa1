"""The HTTP application: routes, dependencies, error handlers and middleware put together."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager

from litestar import Litestar, Router
from litestar.types import ASGIApp

from app.api import docs, problems
from app.api.dependencies import Worker, providers
from app.api.detect import detect, predict
from app.api.health import health, livez, readyz
from app.api.middleware import RequestContextMiddleware
from app.api.models import models
from app.pipeline.detector import Detector
from app.triton.client import TritonClient

Application = ASGIApp
OpenWorker = Callable[[], AbstractAsyncContextManager[tuple[TritonClient, Detector]]]
"""Creates what a worker owns, and closes it after the last request."""


def build(open_worker: OpenWorker, max_body_bytes: int) -> Application:
    """Build the application of one worker."""
    worker = Worker()

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        async with open_worker() as (worker.triton, worker.detector):
            yield

    handlers = [detect, predict, models, health, livez, readyz]
    app = Litestar(
        route_handlers=[*handlers, Router("/v1", route_handlers=handlers, include_in_schema=False), docs.docs_asset],
        dependencies=providers(worker),
        exception_handlers=problems.handlers(),
        lifespan=[lifespan],
        request_max_body_size=max_body_bytes,
        openapi_config=docs.config(),
        logging_config=None,
    )
    return RequestContextMiddleware(app)
