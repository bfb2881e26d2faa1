"""The one implementation of all fixtures: waits as its config says, then finds nothing.

Runs inside the embedded Triton; a copy of it lies beside each config while a measurement runs.
"""

import json
import time
from typing import Any

import numpy as np
import triton_python_backend_utils as triton  # type: ignore[import-not-found]

_ROWS = 300


class TritonPythonModel:
    """One instance of one fixture, as Triton's Python backend wants it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read how long to wait."""
        parameters = json.loads(args["model_config"])["parameters"]
        self._fixed = float(parameters["wait_milliseconds"]["string_value"]) / 1e3
        self._each = float(parameters["wait_milliseconds_per_picture"]["string_value"]) / 1e3
        self._nothing = {
            "num_dets": np.zeros((1, 1), np.int32),
            "det_boxes": np.zeros((1, _ROWS, 4), np.float32),
            "det_scores": np.zeros((1, _ROWS), np.float32),
            "det_classes": np.zeros((1, _ROWS), np.int32),
        }

    def execute(self, requests: list[Any]) -> list[Any]:
        """Answer a batch, each request of one picture, without a look at what is in it."""
        if seconds := self._fixed + self._each * len(requests):
            time.sleep(seconds)
        tensors = [triton.Tensor(name, value) for name, value in self._nothing.items()]
        return [triton.InferenceResponse(tensors) for _ in requests]
