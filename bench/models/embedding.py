"""A simulated model of vectors, for the embedded Triton: it waits, and returns a vector that depends on the pixels."""

import ctypes
import json
import time
import zlib
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]
from clusters import make_vector  # type: ignore[import-not-found]


class TritonPythonModel:
    """The model; interface of Triton's Python backend."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the waiting time."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._seconds = float(parameters["wait_milliseconds"]["string_value"]) / 1e3

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return a vector for each image of a batch of requests."""
        time.sleep(self._seconds)
        images = [np.from_dlpack(pb_utils.get_input_tensor_by_name(request, "image")) for request in requests]
        vectors = [np.stack([make_vector(zlib.crc32(image.tobytes())) for image in batch]) for batch in images]
        return [pb_utils.InferenceResponse([_to_triton("vector", batch)]) for batch in vectors]


# As in model.py.
def _to_triton(name: str, array: np.ndarray) -> "pb_utils.Tensor":
    capsule = array.__dlpack__()
    ctypes.pythonapi.PyCapsule_SetDestructor(ctypes.py_object(capsule), None)
    return pb_utils.Tensor.from_dlpack(name, capsule)
