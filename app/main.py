"""Composition: settings in, application out. Granian calls `create_app` in every worker."""

import asyncio
import gc
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path

import structlog

from app import config
from app.api import application
from app.api.client_watch import BodyLimits
from app.api.keys import ApiKeys
from app.config import Settings
from app.errors import GatewayError
from app.host import allocator, memory
from app.imaging.decode import max_decode_bytes
from app.imaging.header import PixelLimits
from app.pipeline.detector import Detector, Limits
from app.resilience.admission import Admission, Capacity
from app.resilience.worker_table import WorkerTable
from app.telemetry import logging
from app.triton import credentials
from app.triton.client import TritonClient
from app.triton.transport import Transport
from app.zoo import registry

LOG = structlog.get_logger()

_HOUSEKEEPING_SECONDS = 1.0
# After a burst, when a worker has few requests in progress, memory that it has left is given back to the kernel.
_QUIET_BYTES = 16 * 2**20
_GROWTH = 1.1


def create_app(settings: Settings | None = None) -> application.Application:
    """Build the application of one worker.

    Args:
        settings: None reads them from the environment.
    """
    allocator.keep_freed_memory()
    settings = settings or config.load()
    logging.configure(settings.log_level, settings.log_format)
    keys = ApiKeys(Path(settings.api_keys_file)) if settings.api_keys_file else None
    return application.build(partial(open_resources, settings), _body_limits(settings), keys)


@asynccontextmanager
async def open_resources(settings: Settings) -> AsyncIterator[tuple[TritonClient, Detector]]:
    """Open the Triton client and the detector of a worker, and close them in reverse order."""
    async with AsyncExitStack() as stack:
        table = WorkerTable()
        stack.callback(table.close)
        is_started = asyncio.Event()
        beating = asyncio.create_task(_beat(table, is_started))
        stack.push_async_callback(_cancel, beating)
        tls = credentials.load(settings.triton_tls_files)
        triton = TritonClient(settings.triton_url, settings.control_key_path, credentials=tls)
        stack.push_async_callback(triton.close)
        transport = Transport(triton, settings.transport)
        stack.push_async_callback(transport.close)
        await transport.sweep()
        admission = Admission(table, _capacity(settings))
        limits = Limits(settings.decode_threads, _pixel_limits(settings), settings.timeout_seconds, settings.max_timeout_seconds)
        pullable = frozenset(registry.load(settings.registry_path))
        detector = Detector(triton, transport, admission, settings.model, pullable, limits)
        stack.push_async_callback(detector.close)
        with suppress(GatewayError):  # Triton may start later
            await detector.warm_up()
        housekeeping = asyncio.create_task(_keep_house(transport, admission))
        stack.push_async_callback(_cancel, housekeeping)
        is_started.set()
        await asyncio.sleep(0)  # before the worker takes requests
        # Objects that live as long as the worker need not be examined in every collection.
        gc.collect()
        gc.freeze()
        yield triton, detector


def _body_limits(settings: Settings) -> BodyLimits:
    return BodyLimits(settings.max_body_bytes, settings.body_pause_seconds, settings.body_seconds)


def _pixel_limits(settings: Settings) -> PixelLimits:
    return PixelLimits(settings.max_pixels, settings.max_pixels_unscalable)


def _capacity(settings: Settings) -> Capacity:
    """Derive the capacity of this host from the settings."""
    largest = settings.max_body_bytes + max_decode_bytes(_pixel_limits(settings))
    budget = memory.image_budget(settings.memory_mb, largest)
    return Capacity(
        max_uploads=settings.max_uploads,
        upload_bytes=budget,
        memory_bytes=budget,
        max_requests=settings.max_requests,
        target_seconds=settings.timeout_seconds / 2,
        decode_threads=min(len(os.sched_getaffinity(0)), settings.worker_count * settings.decode_threads),
    )


async def _keep_house(transport: Transport, admission: Admission) -> None:
    """Do once a second what no request should wait for."""
    usual_bytes = memory.resident_bytes()
    while True:
        await asyncio.sleep(_HOUSEKEEPING_SECONDS)
        try:
            admission.refresh()
            if admission.memory.own_bytes < _QUIET_BYTES and memory.resident_bytes() > _GROWTH * usual_bytes:
                allocator.return_freed_memory()
                usual_bytes = memory.resident_bytes()
            await transport.retire_idle()
        except Exception:
            LOG.exception("housekeeping failed")


async def _beat(table: WorkerTable, is_started: asyncio.Event) -> None:
    """Show that the event loop runs, from the worker's start until everything is closed."""
    await is_started.wait()
    while True:
        table.beat()
        await asyncio.sleep(_HOUSEKEEPING_SECONDS)


async def _cancel(task: "asyncio.Task[None]") -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
