"""The reference: FastAPI with one gRPC client per worker, shared by its requests.

The image is the body of POST /detect, the same request as for Nereid: there is no multipart form to parse. The blocking client
runs in the threads of asyncio.to_thread; called directly from the coroutine, a worker would process one request at a time.
Settings: BENCH_TRITON (host:port of gRPC), BENCH_MODEL, BENCH_LABELS, and BENCH_TENSOR: FP32 for planes, the common kind of model,
or UINT8.
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

from bench.contestants.processing import OUTPUTS, describe, letterbox, normalize

_MAX_BYTES = 50 * 2**20
_SLOW_MS = 100
_LOG = getLogger("uvicorn.error")


def _detect(client: Any, body: bytes) -> dict[str, Any]:  # noqa: ANN401 - the client has no types
    """Detect objects in an encoded image."""
    image = letterbox(body)
    if os.environ.get("BENCH_TENSOR", "FP32") == "FP32":
        asked = InferInput("images", [1, 3, 640, 640], "FP32").set_data_from_numpy(normalize(image.canvas))
    else:
        asked = InferInput("image", [1, 640, 640, 3], "UINT8").set_data_from_numpy(image.canvas[None])
    answer = client.infer(os.environ["BENCH_MODEL"], [asked], outputs=[InferRequestedOutput(name) for name in OUTPUTS])
    return describe(image, os.environ["BENCH_LABELS"].split("\n"), [answer.as_numpy(name) for name in OUTPUTS])


@asynccontextmanager
async def _lifespan(app: FastAPI) -> AsyncIterator[None]:
    app.state.client = InferenceServerClient(os.environ["BENCH_TRITON"])
    yield
    app.state.client.close()


async def _handle(request: Request) -> ORJSONResponse:
    body = await request.body()
    return ORJSONResponse(await asyncio.to_thread(_detect, request.app.state.client, body))


async def _guard(request: Request, call_next: Callable[[Request], Awaitable[Any]]) -> Any:  # noqa: ANN401
    """Reject large bodies, and report the duration of other requests."""
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


async def _health() -> dict[str, str]:
    return {"status": "healthy"}


app = FastAPI(lifespan=_lifespan, default_response_class=ORJSONResponse)
app.middleware("http")(_guard)
app.add_api_route("/detect", _handle, methods=["POST"])
app.add_api_route("/health", _health)
