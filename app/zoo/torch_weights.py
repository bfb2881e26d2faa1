"""Read weights from a PyTorch file, without PyTorch and without executing the pickle.

The file has the format before PyTorch 1.6: pickles of a magic number, a protocol version, system information and the dictionary of
tensors, a pickle with the keys of the storages, then the length and the numbers of each storage.
"""

import math
import pickle
import struct
from collections import OrderedDict
from io import BytesIO
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
from numpy.lib.stride_tricks import as_strided
from numpy.typing import NDArray

Weights = dict[str, NDArray[Any]]
"""Tensors by name."""

_MAGIC = 0x1950A86A20F9469CFC6C
_LENGTH_BYTES = 8
# The exceptions that a damaged file can raise.
_DAMAGED = (
    pickle.UnpicklingError,
    struct.error,
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    LookupError,
    MemoryError,
    TypeError,
    ValueError,
)
# The opcodes that PyTorch writes. None of them allocates more memory than the file has bytes.
_OPCODES = {
    *(pickle.PROTO, pickle.STOP, pickle.MARK, pickle.GLOBAL, pickle.REDUCE, pickle.BUILD, pickle.BINPERSID),
    *(pickle.NONE, pickle.NEWTRUE, pickle.NEWFALSE, pickle.BININT, pickle.BININT1, pickle.BININT2, pickle.LONG1, pickle.BINUNICODE),
    *(pickle.EMPTY_TUPLE, pickle.TUPLE, pickle.TUPLE1, pickle.TUPLE2, pickle.TUPLE3),
    *(pickle.EMPTY_LIST, pickle.APPEND, pickle.APPENDS, pickle.EMPTY_DICT, pickle.SETITEM, pickle.SETITEMS),
    *(pickle.BINPUT, pickle.LONG_BINPUT, pickle.BINGET, pickle.LONG_BINGET),
}


class _Tensor(NamedTuple):
    """Location of a tensor's numbers, from the first arguments of `_rebuild_tensor_v2`."""

    storage: str
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
    """Read the tensors of a file: contiguous, FP32 or INT64.

    Raises:
        ValueError: The file is damaged, in another format, or contains anything but a dictionary of such tensors.
    """
    try:
        return _read(BytesIO(path.read_bytes()))
    except _DAMAGED as error:
        raise ValueError(f"these are not weights that PyTorch saved before version 1.6: {error}") from error


def _read(file: BytesIO) -> Weights:
    magic, _version, _system, reader = _Reader(file).load(), _Reader(file).load(), _Reader(file).load(), _Reader(file)
    if magic != _MAGIC:
        raise ValueError("the magic number is another one")
    tensors, keys = reader.load(), _Reader(file).load()
    storages = {}
    for key in keys:
        dtype, count = np.dtype(reader.dtypes[key]), int.from_bytes(file.read(_LENGTH_BYTES), "little")
        storages[key] = np.frombuffer(file.read(count * dtype.itemsize), dtype, count)
    return {str(name): _take(storages[tensor.storage], tensor) for name, tensor in tensors.items()}


# Python's unpickler, because the C implementation accepts any opcode and allocates as many slots as the file requests.
class _Reader(pickle._Unpickler):  # noqa: SLF001
    """An unpickler that only creates dictionaries, numbers, texts and `_Tensor`."""

    dispatch: ClassVar = {code: step for code, step in pickle._Unpickler.dispatch.items() if bytes([code]) in _OPCODES}  # noqa: SLF001

    def __init__(self, file: BytesIO) -> None:
        super().__init__(file, encoding="utf-8")
        self.dtypes: dict[str, str] = {}
        """Dtypes of the storages read so far, by key."""

    def find_class(self, module: str, name: str) -> Any:  # noqa: ANN401 - as in the base class
        if (module, name) not in _NAMES:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed")
        return _NAMES[module, name]

    def persistent_load(self, pid: Any) -> str:  # noqa: ANN401 - as in the base class
        _, dtype, key, *_ = pid
        self.dtypes[key] = dtype
        return str(key)


def _take(storage: NDArray[Any], tensor: _Tensor) -> NDArray[Any]:
    """Return the numbers of a tensor, whose axes may have another order in its storage."""
    last = tensor.offset + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.strides, strict=True))
    if min((tensor.offset, *tensor.strides, *tensor.shape)) < 0 or max(last + 1, math.prod(tensor.shape)) > len(storage):
        raise ValueError("a tensor lies outside of its storage")
    strides = [stride * storage.itemsize for stride in tensor.strides]
    return np.ascontiguousarray(as_strided(storage[tensor.offset :], tensor.shape, strides)).reshape(tensor.shape)
