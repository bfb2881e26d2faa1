"""Read weights from a PyTorch file, without PyTorch and without executing the pickle.

The file has the format before PyTorch 1.6: pickles of a magic number, a protocol version, system information and the dictionary of
tensors, a pickle with the keys of the storages, then the length and the numbers of each storage.
"""

import math
import pickle
from collections import OrderedDict
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Weights = dict[str, NDArray[Any]]

_MAGIC = 0x1950A86A20F9469CFC6C
_LENGTH_BYTES = 8


class _Tensor(NamedTuple):
    # From the first arguments of `_rebuild_tensor_v2`.

    storage: tuple[str, str]
    """Key and dtype."""
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


# What a file may name; storages are named by their dtypes.
_NAMES: dict[tuple[str, str], Any] = {
    ("collections", "OrderedDict"): OrderedDict,
    ("torch._utils", "_rebuild_tensor_v2"): lambda *arguments: _Tensor(*arguments[:4]),
    ("torch", "FloatStorage"): "<f4",
    ("torch", "LongStorage"): "<i8",
}


def read_weights(path: Path) -> Weights:
    """Read the tensors of a file: contiguous, FP32 or INT64; raise ValueError if it is damaged, or contains anything else."""
    try:
        return _read(BytesIO(path.read_bytes()))
    except Exception as error:  # a damaged file can raise any
        raise ValueError(f"these are not weights that PyTorch saved before version 1.6: {error}") from error


def _read(file: BytesIO) -> Weights:
    magic, _version, _system, tensors, keys = (_Reader(file).load() for _ in range(5))
    if magic != _MAGIC:
        raise ValueError("the magic number is another one")
    dtypes, storages = dict(tensor.storage for tensor in tensors.values()), {}
    for key in keys:
        dtype, count = np.dtype(dtypes[key]), int.from_bytes(file.read(_LENGTH_BYTES), "little")
        storages[key] = np.frombuffer(file.read(count * dtype.itemsize), dtype, count)
    return {str(name): _take(storages[tensor.storage[0]], tensor) for name, tensor in tensors.items()}


# Python's unpickler, because the C implementation allocates as many slots as the file requests.
class _Reader(pickle._Unpickler):  # noqa: SLF001
    # This opcode allocates as many bytes as the file requests.
    dispatch = {code: load for code, load in pickle._Unpickler.dispatch.items() if code != pickle.BYTEARRAY8[0]}  # noqa: RUF012, SLF001

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as in the base class
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return _NAMES[module, name]

    def persistent_load(self, pid: Any) -> tuple[str, str]:  # noqa: ANN401 - as in the base class
        _, dtype, key, *_ = pid
        return key, dtype


def _take(storage: NDArray[Any], tensor: _Tensor) -> NDArray[Any]:
    # The axes may have another order in the storage.
    if math.prod(tensor.shape) > len(storage):
        raise ValueError("a tensor is larger than its storage")
    size = storage.itemsize
    strides = [stride * size for stride in tensor.strides]
    # numpy rejects a tensor that lies outside of its storage.
    return np.ndarray(tensor.shape, storage.dtype, storage, tensor.offset * size, strides).copy()
