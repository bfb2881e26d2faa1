"""ONNX Runtime, which is installed only where models are added."""

import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import onnx
    from onnxruntime import InferenceSession

TYPES: dict[str, type[np.generic]] = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}
"""Types of inputs by ONNX Runtime's names."""


@contextmanager
def interruptible() -> Iterator[None]:
    """Let signals end the process at once: no handler in Python runs while ONNX Runtime runs a graph, which may not end."""
    handlers = {number: signal.signal(number, signal.SIG_DFL) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def open_session(model: "onnx.ModelProto | Path | bytes", *, optimizes: bool = True) -> "InferenceSession":
    """Load a model, with one thread; raise what ONNX Runtime raises."""
    import onnxruntime  # noqa: PLC0415 - heavy, and not installed if only the API runs

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 4
    if not optimizes:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    content = model if isinstance(model, bytes) else str(model) if isinstance(model, Path) else model.SerializeToString()
    return onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def run(session: "InferenceSession", feed: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Run a model; return its outputs by name."""
    names = [tensor.name for tensor in session.get_outputs()]
    return dict(zip(names, session.run(names, dict(feed)), strict=True))
