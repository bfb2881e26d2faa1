"""The reference's implementation: stock Pillow, FP32 planes, orjson. Runs in the reference's environment."""

import os
from typing import Any

import orjson  # type: ignore[import-not-found]
from tritonclient.grpc import InferenceServerClient, InferInput

from bench.contestants.processing import letterbox, normalize
from bench.contestants.reference import create_app, infer
from bench.experiments.candidates.asgi import AsgiRunner
from bench.experiments.candidates.registry import Step

_MODEL = "null_fp32"
_DETECTION = {"x1": 0.1, "y1": 0.2, "x2": 0.3, "y2": 0.4, "confidence": 0.5, "class": 1, "class_id": 1, "class_name": "bicycle"}
_FIVE = {"detections": [_DETECTION] * 5, "num_detections": 5, "status": "success"}
_NOTHING: dict[str, Any] = {"detections": [], "num_detections": 0, "status": "success"}


def reference_steps() -> dict[str, Step]:
    """Decode, normalize and, with a Triton, run an inference as the reference does."""
    address = os.environ.get("BENCH_TRITON")
    return {
        "decode and letterbox": lambda data: letterbox(data).canvas,
        "normalize": normalize,
        **(_serving(address) if address else {}),
        "encode": lambda _: orjson.dumps(_FIVE),
    }


def _serving(address: str) -> dict[str, Step]:
    """Return the steps of the client and of the web application."""
    client = InferenceServerClient(address)
    runner = AsgiRunner(create_app(lambda _client, _body: _NOTHING))
    return {
        "client": lambda tensor: infer(client, _MODEL, InferInput("images", list(tensor.shape), "FP32"), tensor),
        "framework": runner.send_request,
    }
