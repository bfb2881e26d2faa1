"""Composition: settings in, application out. Granian calls `create_app` in every worker."""

import gc
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial

from app import config
from app.api import application
from app.config import Settings
from app.errors import GatewayError
from app.host import allocator
from app.pipeline.detector import Detector, Limits
from app.resilience.deadline import Deadline
from app.telemetry import logging
from app.triton.client import TritonClient
from app.triton.transport import Transport
from app.zoo import registry


def create_app(settings: Settings | None = None) -> application.Application:
    """Build the application of one worker.

    Args:
        settings: None reads them from the environment.
    """
    allocator.keep_freed_memory()
    settings = settings or config.load()
    logging.configure(settings.log_level, settings.log_format)
    return application.build(partial(open_resources, settings), settings.max_body_bytes)


@asynccontextmanager
async def open_resources(settings: Settings) -> AsyncIterator[tuple[TritonClient, Detector]]:
    """Open the Triton client and the detector of a worker, and close them in reverse order."""
    async with AsyncExitStack() as stack:
        triton = TritonClient(settings.triton_url)
        stack.push_async_callback(triton.close)
        transport = Transport(triton, settings.transport)
        stack.push_async_callback(transport.close)
        await transport.sweep()
        limits = Limits(settings.decode_threads, settings.max_pixels, settings.timeout_seconds)
        pullable = frozenset(registry.load(settings.registry_path))
        detector = Detector(triton, transport, settings.model, pullable, limits)
        stack.push_async_callback(detector.close)
        with suppress(GatewayError):  # Triton may start later
            await detector.prepare(settings.model, Deadline.after(settings.timeout_seconds))
        # Objects that live as long as the worker need not be examined in every collection.
        gc.collect()
        gc.freeze()
        yield triton, detector
