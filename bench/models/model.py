"""The implementation of all fixtures: waits, and then returns the number of objects in its config.

It runs inside the embedded Triton; during a measurement, each config has a copy of it.
"""

import ctypes
import json
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils  # type: ignore[import-not-found]

_ROWS = 300

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
        """Read the waiting time and the objects to return."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._per_batch = float(parameters["wait_milliseconds"]["string_value"]) / 1e3
        self._per_image = float(parameters["wait_milliseconds_per_image"]["string_value"]) / 1e3
        objects = int(parameters.get("objects", {"string_value": "0"})["string_value"])
        self._found = {
            "num_dets": np.full((1, 1), objects, np.int32),
            "det_boxes": np.zeros((1, _ROWS, 4), np.float32),
            "det_scores": np.zeros((1, _ROWS), np.float32),
            "det_classes": np.zeros((1, _ROWS), np.int32),
        }
        # Side by side near the centre, which every letterboxed image covers.
        self._found["det_boxes"][0, :objects] = [(220 + 20 * row, 300, 236 + 20 * row, 340) for row in range(objects)] or 0
        self._found["det_scores"][0, :objects] = np.linspace(0.9, 0.5, objects)
        if any(output["name"] == "det_masks" for output in json.loads(args["model_config"])["output"]):
            self._found |= _masks(self._found["det_boxes"])

    def execute(self, requests: list[Any]) -> list[Any]:
        """Return results for a batch of requests with one or more images each, without reading the images."""
        sizes = [request.inputs()[0].shape()[0] for request in requests]
        if seconds := self._per_batch + self._per_image * sum(sizes):
            time.sleep(seconds)
        return [pb_utils.InferenceResponse(self._answer(images)) for images in sizes]

    def _answer(self, images: int) -> "list[pb_utils.Tensor]":
        return [_to_triton(name, np.repeat(array, images, axis=0)) for name, array in self._found.items()]


def _masks(boxes: np.ndarray) -> dict[str, np.ndarray]:
    """Lay the first 30 boxes over the middle of the input, and return their masks: ellipses with a wavy edge."""
    prototypes, coefficients = np.empty((1, 32, 160, 160), np.float16), np.zeros((1, _ROWS, 32), np.float32)
    y, x = np.mgrid[2:640:4, 2:640:4]
    for row in range(30):
        cx, cy = 114 + 82 * (row % 6), 166 + 77 * (row // 6)
        boxes[0, row] = cx - 114, cy - 86, cx + 114, cy + 86
        angle = np.arctan2(y - cy, x - cx)
        prototypes[0, row] = 1 + 0.1 * np.sin(9 * angle) - np.hypot((x - cx) / 114, (y - cy) / 86)
        coefficients[0, row, row] = 1
    prototypes[0, 30:] = 0
    return {"det_masks": coefficients, "prototypes": prototypes}


# With numpy 2, Triton 2.51's own conversion returns empty tensors without an error; DLPack works with any numpy. Triton adds
# `Tensor` to its module after this one is loaded, so its annotations are strings.
def _to_triton(name: str, array: np.ndarray) -> "pb_utils.Tensor":
    capsule = array.__dlpack__()
    # Triton renames a consumed capsule differently from the DLPack standard, which numpy's destructor reports as an error. The
    # destructor is not needed for a consumed capsule, because Triton releases the array.
    ctypes.pythonapi.PyCapsule_SetDestructor(ctypes.py_object(capsule), None)
    return pb_utils.Tensor.from_dlpack(name, capsule)
