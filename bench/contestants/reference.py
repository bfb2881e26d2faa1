"""The reference: FastAPI with one gRPC client per worker, shared by its requests.

The blocking client works in the threads of asyncio.to_thread, as the seeds' guide describes; called straight
from the coroutine, as in its shortest listing, a worker would answer one request at a time.
It sends FP32 planes, as the models of the seeds' stack take them, or bytes if BENCH_TENSOR is UINT8.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from logging import getLogger
from typing import Any

from fastapi import FastAPI, Request  # type: ignore[import-not-found]
from fastapi.responses import JSONResponse, ORJSONResponse  # type: ignore[import-not-found]
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput

from bench.contestants.preparing import letterboxed, named, normalized

_OUTPUTS = ("num_dets", "det_boxes", "det_scores", "det_classes")
_MAX_BYTES = 50 * 2**20
_SLOW_MS = 100
_LOG = getLogger("uvicorn.error")


def create_app(*, is_shared: bool = True) -> FastAPI:
    """Build the application of one worker.

    Args:
        is_shared: Whether its requests share one client; else each makes its own.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        app.state.client = InferenceServerClient(os.environ["BENCH_TRITON"]) if is_shared else None
        yield
        if app.state.client is not None:
            app.state.client.close()

    app = FastAPI(lifespan=lifespan, default_response_class=ORJSONResponse)
    app.middleware("http")(_timed)
    app.add_api_route("/detect", _detect, methods=["POST"])
    app.add_api_route("/health", _health)
    return app


async def _timed(request: Request, call_next: Callable[[Request], Awaitable[Any]]) -> Any:  # noqa: ANN401
    """Refuse what is too large, tell how long the rest took."""
    length = request.headers.get("content-length")
    if length and int(length) > _MAX_BYTES:
        return JSONResponse({"error": "file too large"}, 413)
    start = time.time()
    response = await call_next(request)
    milliseconds = (time.time() - start) * 1e3
    response.headers["X-Process-Time"] = f"{milliseconds:.2f}ms"
    if milliseconds > _SLOW_MS:
        _LOG.warning("slow request: %s took %.2f ms", request.url.path, milliseconds)
    return response


async def _detect(request: Request) -> ORJSONResponse:
    body = await request.body()
    return ORJSONResponse(await asyncio.to_thread(_answer, request.app.state.client, body))


async def _health() -> dict[str, str]:
    return {"status": "healthy"}


def _answer(shared: Any, body: bytes) -> dict[str, Any]:  # noqa: ANN401
    fitted = letterboxed(body)
    kind = os.environ.get("BENCH_TENSOR", "FP32")
    tensor = normalized(fitted.square) if kind == "FP32" else fitted.square[None]
    picture = InferInput("images" if kind == "FP32" else "image", list(tensor.shape), kind)
    picture.set_data_from_numpy(tensor)
    client = shared or InferenceServerClient(os.environ["BENCH_TRITON"])
    answer = client.infer(os.environ["BENCH_MODEL"], [picture], outputs=[InferRequestedOutput(name) for name in _OUTPUTS])
    if shared is None:
        client.close()
    tensors = [answer.as_numpy(name) for name in _OUTPUTS]
    detections = named(fitted, os.environ["BENCH_LABELS"].split(","), tensors)
    return {
        "detections": detections,
        "num_detections": len(detections),
        "status": "success",
        "image": {"width": fitted.width, "height": fitted.height},
    }


app = create_app()
