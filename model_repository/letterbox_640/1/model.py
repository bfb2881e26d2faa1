"""Triton's side of the DALI pipeline. The Python backend runs it, because DALI's own backend cannot read BYTES tensors."""

import json
import os
import sys

import numpy as np
import triton_python_backend_utils as pb_utils

# NVIDIA's container names the folder of its DALI in PYTHONPATH, which the Python backend ignores.
sys.path[:0] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
from letterbox import letterbox  # noqa: E402

_THREADS = 4
# Takes the place of a file that cannot be decoded: a PNG of one pixel.
_BLANK = bytes.fromhex(
    "89504e470d0a1a0a0000000d4948445200000001000000010802000000907753de"
    "0000000c49444154789c63606060000000040001f61738550000000049454e44ae426082"
)


class TritonPythonModel:
    """One instance, as Triton's Python backend expects it."""

    def initialize(self, args: dict[str, str]) -> None:
        """Build the pipeline that the config describes."""
        config = json.loads(args["model_config"])
        parameters = {key: value["string_value"] for key, value in config["parameters"].items()}
        (square,) = {output["dims"][0] for output in config["output"] if output["name"] == "image"}
        is_on_gpu = args["model_instance_kind"] == "GPU"
        self._options = {
            "square": int(square),
            "placement": parameters["placement"],
            "enlarge": parameters["enlarge"] == "true",
            "pad": int(parameters["pad"]),
            "device": "gpu" if is_on_gpu else "cpu",
            "batch_size": config["max_batch_size"],
            "num_threads": _THREADS,
            "device_id": int(args["model_instance_device_id"]) if is_on_gpu else None,
            "prefetch_queue_depth": 1,  # a batch is complete when it is run
        }
        self._pipeline = letterbox(**self._options)

    def execute(self, requests: list) -> list:
        """Decode the files of each request as one batch."""
        return [self._answer(request) for request in requests]

    def _answer(self, request: "pb_utils.InferenceRequest") -> "pb_utils.InferenceResponse":
        try:
            files = [np.frombuffer(file, np.uint8) for file in pb_utils.get_input_tensor_by_name(request, "file").as_numpy().flat]
            image, decoded = self._draw(files)
            return pb_utils.InferenceResponse([image, pb_utils.Tensor("decoded", decoded)])
        except Exception as error:  # noqa: BLE001 - it belongs to this request
            return pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))

    def _draw(self, files: list[np.ndarray]) -> tuple["pb_utils.Tensor", np.ndarray]:
        """Decode files; if one of them cannot be decoded, find out which, because DALI fails for the whole batch."""
        decoded = np.ones((len(files), 1), np.int32)
        try:
            images = self._run(files)
        except RuntimeError:
            for index, file in enumerate(files):
                try:
                    self._run([file])
                except RuntimeError:
                    files[index], decoded[index] = np.frombuffer(_BLANK, np.uint8), 0
            images = self._run(files)
        return images, decoded

    def _run(self, files: list[np.ndarray]) -> "pb_utils.Tensor":
        try:
            (images,) = self._pipeline.run(files=files)
        except RuntimeError:
            self._pipeline = letterbox(**self._options)  # DALI says that the failed one is not valid any more
            raise
        return pb_utils.Tensor.from_dlpack("image", images.as_tensor())
