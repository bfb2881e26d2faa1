"""Read BYTES tensors inside the embedded Triton, under any numpy.

Triton 2.51 decodes them before a model asks for them, from a copy in which, under numpy 2, every byte is the first one. Here
they are read where Triton has them. Runs inside Triton; the gateway never imports it.
"""

import ctypes
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BYTES = 13
_LENGTH_BYTES = 4


class TensorMembers(ctypes.Structure):
    """The members of Triton's tensor up to its size, as the compiler has laid them out.

    Source: `PbTensor` in src/pb_tensor.h of python_backend, whose binary `install` pins.
    """

    _fields_ = (
        ("name_address", ctypes.c_void_p),
        ("name_length", ctypes.c_size_t),
        ("short_name", ctypes.c_char * 16),
        ("array", ctypes.c_void_p),
        ("serialized_array", ctypes.c_void_p),
        ("datatype", ctypes.c_int),
        ("memory", ctypes.c_void_p),
        ("memory_type_id", ctypes.c_int64),
        ("dims", ctypes.c_void_p * 3),
        ("memory_type", ctypes.c_int),
        ("memory_bytes", ctypes.c_uint64),
    )


class _Undecoded:
    """What Triton takes for the decoded elements of a tensor, and gives the tensor's shape."""

    def reshape(self, shape: list[int]) -> NDArray[np.object_]:
        return np.empty(shape, np.object_)


def leave_undecoded(triton: ModuleType) -> None:
    """Let Triton's module not decode BYTES tensors: under numpy 2 that fails, and takes the process down."""
    triton.deserialize_bytes_tensor = lambda _encoded: _Undecoded()  # type: ignore[attr-defined]


def read(tensor: Any) -> NDArray[np.object_]:  # noqa: ANN401 - Triton's classes have no types
    """Read an input tensor that was left undecoded: elements of type `bytes`, in the shape of the tensor.

    Raises:
        RuntimeError: This is not the Triton whose tensors are known here.
        ValueError: There are more or fewer elements than the shape says.
    """
    # pybind11 has the address of the object behind Python's own header.
    address = ctypes.c_void_p.from_address(id(tensor) + object.__basicsize__).value
    raw = TensorMembers.from_address(address or 0)
    if raw.datatype != _BYTES or ctypes.string_at(raw.name_address, raw.name_length).decode() != tensor.name():
        raise RuntimeError("BYTES tensors of this Triton cannot be read")
    elements = split(ctypes.string_at(raw.memory, raw.memory_bytes))
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array.reshape(tensor.as_numpy().shape)


def split(encoded: bytes) -> list[bytes]:
    """Split the bytes of a tensor into its elements, each of which comes after its length: four bytes, little-endian."""
    elements = []
    at = 0
    while at < len(encoded):
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(encoded[at:start], "little")
        elements.append(encoded[start:at])
    return elements
