"""The implementation of all fixtures: waits, and then returns nothing, or objects with masks if its config has them.

It runs inside the embedded Triton; during a measurement, each config has a copy of it.
"""

import ctypes
import json
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

_ROWS, _OBJECTS = 300, 30

# Triton 2.51 decodes BYTES tensors before a model asks for them. With numpy 2 it passes this function a corrupt array; decoding it
# crashes the process. The fixtures do not use their input.
pb_utils.deserialize_bytes_tensor = lambda _encoded: _Unread()


class _Unread:
    """Placeholder for undecoded strings, which Triton reshapes."""

    def reshape(self, shape: tuple[int, ...]) -> np.ndarray:
        """Return empty strings in this shape."""
        return np.full(shape, b"", np.object_)


class TritonPythonModel:
    """One instance of a fixture; interface of Triton's Python backend."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the waiting time, and whether to return objects with masks."""
        config = json.loads(args["model_config"])
        parameters = config["parameters"]
        self._per_batch = float(parameters["wait_milliseconds"]["string_value"]) / 1e3
        self._per_image = float(parameters["wait_milliseconds_per_image"]["string_value"]) / 1e3
        self._found = {
            "num_dets": np.zeros((1, 1), np.int32),
            "det_boxes": np.zeros((1, _ROWS, 4), np.float32),
            "det_scores": np.zeros((1, _ROWS), np.float32),
            "det_classes": np.zeros((1, _ROWS), np.int32),
        }
        if any(output["name"] == "det_masks" for output in config["output"]):
            _add_masks(self._found)

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return results for a batch of requests with one or more images each, without reading the images."""
        sizes = [request.inputs()[0].shape()[0] for request in requests]
        if seconds := self._per_batch + self._per_image * sum(sizes):
            time.sleep(seconds)
        return [pb_utils.InferenceResponse(self._answer(images)) for images in sizes]

    def _answer(self, images: int) -> "list[pb_utils.Tensor]":
        return [_to_triton(name, np.repeat(array, images, axis=0)) for name, array in self._found.items()]


def _add_masks(found: dict[str, np.ndarray]) -> None:
    """Add objects whose boxes lie over the middle of the input, with their masks: ellipses with a wavy edge."""
    found["num_dets"][:] = _OBJECTS
    found["det_scores"][0, :_OBJECTS] = np.linspace(0.9, 0.5, _OBJECTS)
    prototypes, coefficients = np.empty((1, 32, 160, 160), np.float16), np.zeros((1, _ROWS, 32), np.float32)
    y, x = np.mgrid[2:640:4, 2:640:4]
    for row in range(_OBJECTS):
        cx, cy = 114 + 82 * (row % 6), 166 + 77 * (row // 6)
        found["det_boxes"][0, row] = cx - 114, cy - 86, cx + 114, cy + 86
        angle = np.arctan2(y - cy, x - cx)
        prototypes[0, row] = 1 + 0.1 * np.sin(9 * angle) - np.hypot((x - cx) / 114, (y - cy) / 86)
        coefficients[0, row, row] = 1
    prototypes[0, _OBJECTS:] = 0
    found.update(det_masks=coefficients, prototypes=prototypes)


# With numpy 2, Triton 2.51's own conversion returns empty tensors without an error; DLPack works with any numpy. Triton adds
# `Tensor` to its module after this one is loaded, so its annotations are strings.
def _to_triton(name: str, array: np.ndarray) -> "pb_utils.Tensor":
    capsule = array.__dlpack__()
    # Triton renames a consumed capsule differently from the DLPack standard, which numpy's destructor reports as an error. The
    # destructor is not needed for a consumed capsule, because Triton releases the array.
    ctypes.pythonapi.PyCapsule_SetDestructor(ctypes.py_object(capsule), None)
    return pb_utils.Tensor.from_dlpack(name, capsule)
