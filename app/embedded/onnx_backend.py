"""Takes the place of Triton's onnxruntime backend where only the Python backend exists.

Runs inside the embedded Triton, in an environment of its own; the gateway never imports it. Installed once as the
backend `onnxruntime`, it executes the `model.onnx` of every model that names that backend, with one CPU thread per
instance unless the model's parameter `intra_op_thread_count` says otherwise.
"""

import ctypes
import json
from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as triton


class TritonPythonModel:
    """One instance of one model, as Triton's Python backend expects it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model's file."""
        options = onnxruntime.SessionOptions()
        parameters = json.loads(args["model_config"]).get("parameters", {})
        options.intra_op_num_threads = int(parameters.get("intra_op_thread_count", {}).get("string_value", "1"))
        options.inter_op_num_threads = 1
        file = Path(args["model_repository"], args["model_version"], "model.onnx")
        self._session = onnxruntime.InferenceSession(file, options, providers=["CPUExecutionProvider"])
        self._inputs = [tensor.name for tensor in self._session.get_inputs()]
        self._outputs = [tensor.name for tensor in self._session.get_outputs()]

    def execute(self, requests: list) -> list:
        """Run what Triton has batched, as one batch where the shapes allow it."""
        feeds = [{name: _to_numpy(triton.get_input_tensor_by_name(r, name)) for name in self._inputs} for r in requests]
        try:
            results = self._run_batch(feeds) if len(feeds) > 1 else [self._run(feeds[0])]
        except Exception as error:  # noqa: BLE001 - an exception that leaves here leaks Triton's shared memory
            return [triton.InferenceResponse(error=triton.TritonError(str(error))) for _ in requests]
        return [triton.InferenceResponse(list(map(_to_triton, self._outputs, result))) for result in results]

    def _run(self, feed: dict[str, np.ndarray]) -> list[np.ndarray]:
        return self._session.run(self._outputs, feed)

    def _run_batch(self, feeds: list[dict[str, np.ndarray]]) -> list[list[np.ndarray]]:
        """Run requests, each a batch of one or more, as one batch, and split the results again."""
        sizes = [len(feed[self._inputs[0]]) for feed in feeds]
        together = self._run({name: np.concatenate([feed[name] for feed in feeds]) for name in self._inputs})
        parts = [np.split(tensor, np.cumsum(sizes)[:-1]) for tensor in together]
        return [list(result) for result in zip(*parts, strict=True)]


# Triton 2.51's own conversions return empty tensors under numpy 2, without an error; DLPack works with any numpy. Triton
# adds `Tensor` to its module after this one is loaded, so annotations of it are strings.
def _to_numpy(tensor: "triton.Tensor") -> np.ndarray:
    return np.from_dlpack(tensor)


def _to_triton(name: str, array: np.ndarray) -> "triton.Tensor":
    capsule = np.ascontiguousarray(array).__dlpack__()
    # Triton marks a consumed capsule with another name than the DLPack standard, which numpy's destructor would report as
    # an error each time. It has nothing to do for a consumed capsule: Triton releases the array.
    ctypes.pythonapi.PyCapsule_SetDestructor(ctypes.py_object(capsule), None)
    return triton.Tensor.from_dlpack(name, capsule)
