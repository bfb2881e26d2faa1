"""The reference: FastAPI with one gRPC client per worker, shared by its requests.

The image is the body of POST /detect, the same request as for Nereid: there is no multipart form to parse. The blocking client
runs in the threads of asyncio.to_thread; called directly from the coroutine, a worker would process one request at a time.
Pre- and post-processing are as is common in Python services: Pillow, the gateway's pillow-simd, then numpy. Settings: BENCH_TRITON
(host:port of gRPC), BENCH_MODEL, and BENCH_TENSOR: FP32 for planes, the common kind of model, or UINT8.
"""

import asyncio
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from io import BytesIO
from logging import getLogger
from typing import Any, NamedTuple

import numpy as np
from fastapi import FastAPI, Request  # type: ignore[import-not-found]
from fastapi.responses import JSONResponse, ORJSONResponse  # type: ignore[import-not-found]
from numpy.typing import NDArray
from PIL import Image
from tritonclient.grpc import InferenceServerClient, InferInput, InferRequestedOutput

_OUTPUTS = ("num_dets", "det_boxes", "det_scores", "det_classes")
"""Outputs of a detector: number of rows (1, 1); boxes (1, n, 4) x1 y1 x2 y2 in pixels of the canvas; scores (1, n), descending;
class ids (1, n)."""
_LABELS = ("nothing",)  # of the models in `bench.models`
_SIDE = 640
_PAD = 114
_MIN_CONFIDENCE = 0.25
_MAX_BYTES = 50 * 2**20
_SLOW_MS = 100
_LOG = getLogger("uvicorn.error")


class _Letterboxed(NamedTuple):
    """An image on a canvas, and its position."""

    canvas: NDArray[np.uint8]
    """Shape (640, 640, 3), RGB."""
    scale: float
    left: int
    top: int
    width: int
    """Width of the original image, in pixels."""
    height: int
    """Height of the original image, in pixels."""


def _letterbox(data: bytes) -> _Letterboxed:
    """Decode an image and fit it to the centre of a canvas."""
    image = Image.open(BytesIO(data)).convert("RGB")
    width, height = image.size
    scale = min(_SIDE / width, _SIDE / height)
    inner = round(width * scale), round(height * scale)
    left, top = (_SIDE - inner[0]) // 2, (_SIDE - inner[1]) // 2
    canvas = np.full((_SIDE, _SIDE, 3), _PAD, np.uint8)
    canvas[top : top + inner[1], left : left + inner[0]] = np.asarray(image.resize(inner, Image.Resampling.BILINEAR))
    return _Letterboxed(canvas, scale, left, top, width, height)


def _normalize(canvas: NDArray[np.uint8]) -> NDArray[np.float32]:
    """Convert a canvas to FP32 (1, 3, 640, 640), 0 to 1."""
    planes = (canvas.astype(np.float32) / 255.0).transpose(2, 0, 1)
    return np.ascontiguousarray(planes)[None]


def _describe(image: _Letterboxed, tensors: Sequence[NDArray[Any]]) -> dict[str, Any]:
    """Build the response from `_OUTPUTS`: detections with corners as fractions of the image, and its size."""
    count, boxes, scores, classes = tensors
    detections: list[dict[str, Any]] = []
    for row in range(int(count[0, 0])):
        confidence = float(scores[0, row])
        if confidence < _MIN_CONFIDENCE:
            break
        x1, y1, x2, y2 = (float(value) for value in boxes[0, row])
        id_ = int(classes[0, row])
        detections.append(
            {
                "x1": min(max((x1 - image.left) / image.scale / image.width, 0.0), 1.0),
                "y1": min(max((y1 - image.top) / image.scale / image.height, 0.0), 1.0),
                "x2": min(max((x2 - image.left) / image.scale / image.width, 0.0), 1.0),
                "y2": min(max((y2 - image.top) / image.scale / image.height, 0.0), 1.0),
                "confidence": confidence,
                "class": id_,
                "class_id": id_,
                "class_name": _LABELS[id_],
            }
        )
    size = {"width": image.width, "height": image.height}
    return {"detections": detections, "num_detections": len(detections), "status": "success", "image": size}


def _detect(client: Any, body: bytes) -> dict[str, Any]:  # noqa: ANN401 - the client has no types
    """Detect objects in an encoded image."""
    image = _letterbox(body)
    if os.environ.get("BENCH_TENSOR", "FP32") == "FP32":
        asked = InferInput("images", [1, 3, 640, 640], "FP32").set_data_from_numpy(_normalize(image.canvas))
    else:
        asked = InferInput("image", [1, 640, 640, 3], "UINT8").set_data_from_numpy(image.canvas[None])
    answer = client.infer(os.environ["BENCH_MODEL"], [asked], outputs=[InferRequestedOutput(name) for name in _OUTPUTS])
    return _describe(image, [answer.as_numpy(name) for name in _OUTPUTS])


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
