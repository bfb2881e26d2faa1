"""Stands in for CUDA in a rehearsal: the CPU runs the same files. Imported first in each process of a model's environment."""

import ctypes
from typing import Any

import onnxruntime

_load = ctypes.CDLL


class _Session(onnxruntime.InferenceSession):  # type: ignore[misc]  # it has no types
    def __init__(self, file: Any, options: Any, providers: list[Any], **_: Any) -> None:  # noqa: ANN401
        super().__init__(file, options, providers=providers[-1:])
        self.get_providers = onnxruntime.get_available_providers


ctypes.CDLL = lambda name, *more: None if name == "libcuda.so.1" else _load(name, *more)  # type: ignore[assignment, misc]
onnxruntime.get_available_providers = lambda: ["CUDAExecutionProvider", "CPUExecutionProvider"]
onnxruntime.preload_dlls = lambda: None
onnxruntime.InferenceSession = _Session
