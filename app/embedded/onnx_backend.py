"""An ONNX backend for a Triton that has only the Python backend; it replaces Triton's own onnxruntime backend.

It runs inside the embedded Triton, in a separate environment; the gateway never imports it. It is installed once as the backend
`onnxruntime`, and runs the `model.onnx` of every model with that backend. While others run, an instance uses one CPU thread, or the
number in the model's parameter `intra_op_thread_count`.

If a model's config declares a BYTES input, but its file takes UINT8 pixels, the input is encoded files. They are decoded here
according to the parameters in the config, and the output `decoded` reports the success for each file.

In the environment for a GPU, models run by CUDA, in FP16 if they have that graph. If CUDA does not load, no model does.
"""

import ctypes
import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import triton_python_backend_utils as pb_utils

from app.embedded import bytes_tensor
from app.embedded.cpu_session import CpuSession

_STRING, _PIXELS = "tensor(string)", "tensor(uint8)"
_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"

bytes_tensor.leave_undecoded(pb_utils)


class TritonPythonModel:
    """One instance of a model; interface of Triton's Python backend."""

    def initialize(self, args: dict[str, str]) -> None:
        """Load the model's file."""
        config = json.loads(args["model_config"])
        threads = config.get("parameters", {}).get("intra_op_thread_count", {}).get("string_value", "1")
        self._session = _open(Path(args["model_repository"], args["model_version"]), int(threads))
        self._inputs = {tensor.name: tensor.type for tensor in self._session.get_inputs()}
        self._outputs = [tensor.name for tensor in self._session.get_outputs()]
        self._files = None
        if list(self._inputs.values()) == [_PIXELS] and config["input"][0]["data_type"] == "TYPE_STRING":
            from app.embedded.file_input import FileInput  # noqa: PLC0415 - other models need no decoders

            self._files = FileInput(config)
            self._file_name = config["input"][0]["name"]

    def execute(self, requests: list) -> list:
        """Run the requests of a batch together if their shapes allow it; if that fails, run them one by one."""
        try:
            wanted = [set(request.requested_output_names()) for request in requests]
            names = [name for name in self._outputs if any(name in some for some in wanted)]
            feeds, notes = zip(*map(self._read, requests), strict=True)
            results = self._run_batch(feeds, names) if len(feeds) > 1 else [self._session.run(names, feeds[0])]
            return [
                pb_utils.InferenceResponse(
                    [
                        _to_triton(name, array)
                        for name, array in (dict(zip(names, result, strict=True)) | note).items()
                        if name in some
                    ]
                )
                for some, result, note in zip(wanted, results, notes, strict=True)
            ]
        except Exception as error:  # noqa: BLE001 - an uncaught exception leaks Triton's shared memory
            if len(requests) > 1:
                return [self.execute([request])[0] for request in requests]
            return [pb_utils.InferenceResponse(error=pb_utils.TritonError(str(error)))]

    def _read(self, request: "pb_utils.InferenceRequest") -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
        # The second ones are outputs that do not depend on the network.
        if self._files is None:
            return {name: self._input(request, name) for name in self._inputs}, {}
        files = bytes_tensor.read(pb_utils.get_input_tensor_by_name(request, self._file_name))
        pixels, note = self._files.draw(files.ravel().tolist())
        return dict.fromkeys(self._inputs, pixels), note

    def _input(self, request: "pb_utils.InferenceRequest", name: str) -> np.ndarray:
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return bytes_tensor.read(tensor) if self._inputs[name] == _STRING else np.from_dlpack(tensor)

    def _run_batch(self, feeds: Sequence[dict[str, np.ndarray]], names: list[str]) -> list[list[np.ndarray]]:
        sizes = [len(next(iter(feed.values()))) for feed in feeds]
        together = self._session.run(names, {name: np.concatenate([feed[name] for feed in feeds]) for name in self._inputs})
        parts = [np.split(tensor, np.cumsum(sizes)[:-1]) for tensor in together]
        return [list(result) for result in zip(*parts, strict=True)]


def _open(version: Path, threads: int) -> onnxruntime.InferenceSession | CpuSession:
    file = version / "model.onnx"
    if _CUDA not in onnxruntime.get_available_providers():
        return CpuSession(file, threads)
    # ONNX Runtime would go on with the CPU, and say so in the log alone.
    ctypes.CDLL("libcuda.so.1")  # of the driver; the other libraries are in the environment
    onnxruntime.preload_dlls()
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    half = version / "model_fp16.onnx"
    # Batches have many sizes, and the default search would try all algorithms for each of them.
    cuda = (_CUDA, {"cudnn_conv_algo_search": "HEURISTIC"})
    session = onnxruntime.InferenceSession(half if half.is_file() else file, options, providers=[cuda, _CPU], enable_fallback=0)
    if _CUDA not in session.get_providers():
        raise RuntimeError("CUDA does not load; Triton's log says why")
    return session


# With numpy 2, Triton 2.51's own conversions return empty tensors without an error. DLPack, which does not support strings, works
# with any numpy. Triton adds its classes to `pb_utils` after this module is loaded, so their annotations are strings.
def _to_triton(name: str, array: np.ndarray) -> "pb_utils.Tensor":
    if array.dtype == np.object_:
        return pb_utils.Tensor(name, array)
    capsule = np.ascontiguousarray(array).__dlpack__()
    # Triton renames a consumed capsule differently from the DLPack standard, which numpy's destructor reports as an error. The
    # destructor is not needed for a consumed capsule, because Triton releases the array.
    ctypes.pythonapi.PyCapsule_SetDestructor(ctypes.py_object(capsule), None)
    return pb_utils.Tensor.from_dlpack(name, capsule)
