"""ONNX Runtime with CUDA alone, in the environment of the embedded Triton's models: prints images/s by size of batch, as JSON."""

import json
import sys
from time import perf_counter

import numpy as np
import onnxruntime

_CUDA = "CUDAExecutionProvider"
_SIDE = 640
"""Height and width where the network takes any."""


def main(file: str, seconds: float, batches: list[int]) -> None:
    """Run a model's file with each size of batch for so many seconds."""
    onnxruntime.preload_dlls()
    providers = [(_CUDA, {"cudnn_conv_algo_search": "HEURISTIC"}), "CPUExecutionProvider"]  # as `onnx_backend`
    session = onnxruntime.InferenceSession(file, onnxruntime.SessionOptions(), providers=providers, enable_fallback=0)
    if _CUDA not in session.get_providers():
        raise SystemExit("CUDA does not load")
    (tensor,), rates = session.get_inputs(), {}
    shape = [side if isinstance(side, int) else _SIDE for side in tensor.shape[1:]]
    for batch in batches:
        noise = np.random.default_rng(0).integers(0, 256, (batch, *shape), np.uint8)
        session.run(None, {tensor.name: noise})  # the first one chooses algorithms
        count, start = 0, perf_counter()
        while not count or perf_counter() - start < seconds:
            session.run(None, {tensor.name: noise})
            count += batch
        rates[batch] = count / (perf_counter() - start)
    print(json.dumps(rates))


if __name__ == "__main__":
    main(sys.argv[1], float(sys.argv[2]), [int(batch) for batch in sys.argv[3:]])
