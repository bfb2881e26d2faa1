"""Composition: settings in, application out. Granian calls `create_app` in every worker."""

import gc
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress

from litestar import Litestar, Router
from litestar.types import ASGIApp

from app import allocator, catalogue, config, log, openapi, problems
from app.config import Settings
from app.detector import Detector, Limits
from app.envelope import Envelope
from app.errors import GatewayError
from app.health import health, livez, readyz
from app.routes import detect, models, predict
from app.transport import Transport
from app.triton import Triton


def create_app(settings: Settings | None = None) -> ASGIApp:
    """Build the application of one worker.

    Args:
        settings: None reads them from the environment.
    """
    allocator.keep_freed_memory()
    settings = settings or config.load()
    log.configure(settings.log_level, settings.log_format)
    handlers = [detect, predict, models, health, livez, readyz]
    app = Litestar(
        route_handlers=[*handlers, Router("/v1", route_handlers=handlers, include_in_schema=False), openapi.docs_asset],
        exception_handlers=problems.handlers(settings.max_file_size_mb),
        lifespan=[_lifespan(settings)],
        request_max_body_size=settings.max_body_bytes,
        openapi_config=openapi.config(),
        logging_config=None,
    )
    return Envelope(app)


def _lifespan(settings: Settings) -> Callable[[Litestar], AbstractAsyncContextManager[None]]:
    @asynccontextmanager
    async def lifespan(app: Litestar) -> AsyncIterator[None]:
        """Own what a worker owns. Granian ends it after the last request."""
        async with AsyncExitStack() as stack:
            triton = Triton(settings.triton_url)
            stack.push_async_callback(triton.close)
            transport = Transport(triton, settings.transport)
            stack.push_async_callback(transport.close)
            stack.push_async_callback(triton.drain)
            await transport.sweep()
            limits = Limits(settings.decode_threads, settings.max_pixels, settings.timeout_seconds)
            pullable = frozenset(catalogue.load(settings.catalogue))
            detector = Detector(triton, transport, settings.model, pullable, limits)
            stack.callback(detector.close)
            app.state.detector = detector
            with suppress(GatewayError):  # Triton may come later
                await detector.ready(settings.model)
            # What lives as long as the worker need not be looked at in every collection.
            gc.collect()
            gc.freeze()
            yield

    return lifespan
