"""Nereid's own functions, with the tensor in the request or in shared memory."""

import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, redirect_stdout
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from app.api.answering.native import to_response
from app.api.application import build
from app.host import allocator
from app.imaging.decode import decode
from app.imaging.fit import Letterbox
from app.imaging.header import ImageHeader, PixelLimits, read_header
from app.imaging.transform import ImageTransform
from app.main import deployment_of, open_resources
from app.model.spec import ModelSpec, from_triton_config
from app.pipeline.pipeline import Pipeline
from app.pipeline.results import Detections
from app.resilience.deadline import Deadline
from app.settings.schema import Settings
from app.telemetry import logging
from app.telemetry.metrics import Metrics
from app.triton.client import TritonClient
from app.triton.pool import TritonPool
from app.triton.transport import Transport
from bench.experiments.candidates.asgi import AsgiRunner
from bench.experiments.candidates.registry import Step

_SIDE = 640
_PIXEL_LIMITS = PixelLimits(jpeg=50_000_000, non_jpeg=50_000_000)
_MODEL = "null"
_SECONDS = 10.0
_BOXES, _SCORES = np.tile(np.array([64, 96, 192, 192], np.float32), (5, 1)), np.full(5, 0.5, np.float32)
_SPEC = from_triton_config(
    {
        "name": _MODEL,
        "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [_SIDE, _SIDE, 3]}],
        "output": [{"name": "output0", "data_type": "TYPE_FP32", "dims": [300, 6]}],
    },
    "1",
)

Canvas = NDArray[np.uint8]


def inline_steps() -> dict[str, Step]:
    """Draw on a new canvas for each image, which is sent in the request."""
    return {**_imaging(lambda: np.empty((_SIDE, _SIDE, 3), np.uint8)), **_serving("inline"), "encode": _encode}


def shared_steps() -> dict[str, Step]:
    """Draw on a reused canvas, like a slot in shared memory; the request only names it."""
    canvas = np.zeros((_SIDE, _SIDE, 3), np.uint8)
    return {**_imaging(lambda: canvas), **_serving("shm"), "encode": _encode}


def _imaging(allocate_canvas: Callable[[], Canvas]) -> dict[str, Step]:
    letterbox = Letterbox((_SIDE, _SIDE), "center", enlarge=True, pad=114)

    def decode_step(header: ImageHeader) -> tuple[Canvas, ImageTransform, Canvas]:
        canvas = allocate_canvas()
        transform = letterbox.fit(header.width, header.height)
        return decode(header, transform.min_decode_size, transform.area(canvas)), transform, canvas

    def letterbox_step(decoded: tuple[Canvas, ImageTransform, Canvas]) -> Canvas:
        pixels, transform, canvas = decoded
        letterbox.draw(pixels, transform, canvas)
        return canvas

    return {"header": lambda data: read_header(data, _PIXEL_LIMITS), "decode": decode_step, "letterbox": letterbox_step}


def _serving(transport: str) -> dict[str, Step]:
    """Return the steps of Triton's client and of the web application; none without a Triton."""
    address = os.environ.get("BENCH_TRITON")
    if not address:
        return {}
    values = {"triton_endpoints": address, "model": _MODEL, "transport": transport}
    settings = msgspec.convert(values, Settings)
    allocator.keep_freed_memory()
    with redirect_stdout(sys.stderr):  # a line of the log may follow the result
        logging.configure("info")
    opened: list[tuple[TritonClient, Pipeline, Transport, ModelSpec]] = []

    @asynccontextmanager
    async def open_and_keep() -> AsyncIterator[tuple[TritonPool, Pipeline, Metrics]]:
        async with open_resources(settings) as (pool, pipeline, metrics):
            spec = await pipeline.prepare(_MODEL, Deadline.after(_SECONDS))
            opened.append((pool.servers[0].client, pipeline, pool.transport, spec))
            yield pool, pipeline, metrics

    runner = AsgiRunner(build(open_and_keep, deployment_of(settings)))
    ((client, pipeline, slots, spec),) = opened
    nothing = np.empty(0, np.float32)
    found = Detections(nothing.reshape(0, 4), nothing, nothing.astype(np.int32), _SIDE, _SIDE, spec, "1")

    async def run(*_arguments: Any, **_more: Any) -> Detections:  # noqa: ANN401
        return found

    async def infer(tensor: Canvas) -> Any:  # noqa: ANN401
        slot = slots.take(spec.image_bytes, spec.image_bytes)
        try:
            return await client.infer(spec, [tensor], timeout_seconds=_SECONDS, request_id="bench", slot=slot)
        finally:
            if slot is not None:
                slot.free()

    pipeline.run = run  # type: ignore[method-assign, assignment]
    return {"client": lambda tensor: runner.loop.run_until_complete(infer(tensor)), "framework": runner.send_request}


def _encode(_: Any) -> bytes:  # noqa: ANN401
    """Encode a response with five detections."""
    found = Detections(_BOXES, _SCORES, np.zeros(len(_SCORES), np.int32), 640, 480, _SPEC, "1")
    return msgspec.json.encode(to_response(found, "normalized", {"total_time_ms": 1.0, "request_id": "0123456789abcdef"}))
