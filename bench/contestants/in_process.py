"""A server without Triton: FastAPI with ONNX Runtime in the same process, one session with default options.

It runs the composed model that Triton serves, a detector or a classifier. Settings: BENCH_MODEL, the path of the file, and
BENCH_LABELS.
"""

import os
from typing import Any

import onnxruntime
from fastapi import FastAPI, Request  # type: ignore[import-not-found]
from fastapi.concurrency import run_in_threadpool  # type: ignore[import-not-found]

from bench.contestants.processing import OUTPUTS, center_crop, describe, describe_classes, letterbox

_SESSION = onnxruntime.InferenceSession(os.environ["BENCH_MODEL"], providers=["CPUExecutionProvider"])
_LABELS = os.environ["BENCH_LABELS"].split("\n")

app = FastAPI()


@app.post("/detect")  # type: ignore[untyped-decorator]
async def _detect(request: Request) -> dict[str, Any]:
    return await run_in_threadpool(_infer, await request.body())  # type: ignore[no-any-return]


@app.post("/classify")  # type: ignore[untyped-decorator]
async def _classify(request: Request) -> dict[str, Any]:
    return await run_in_threadpool(_infer_classes, await request.body())  # type: ignore[no-any-return]


@app.get("/health")  # type: ignore[untyped-decorator]
async def _health() -> dict[str, str]:
    return {"status": "healthy"}


def _infer(body: bytes) -> dict[str, Any]:
    image = letterbox(body)
    return describe(image, _LABELS, _SESSION.run(OUTPUTS, {"image": image.canvas[None]}))


def _infer_classes(body: bytes) -> dict[str, Any]:
    (probabilities,) = _SESSION.run(["probabilities"], {"image": center_crop(body)[None]})
    return describe_classes(_LABELS, probabilities)
