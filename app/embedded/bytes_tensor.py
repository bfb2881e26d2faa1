"""Read BYTES tensors inside the embedded Triton, with any version of numpy.

Triton 2.51 decodes them before a model asks for them. With numpy 2 it decodes a corrupt copy, in which every byte equals the first.
This module reads Triton's own memory instead. It runs inside Triton; the gateway never imports it.
"""

import ctypes
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
from numpy.typing import NDArray

_BYTES = 13
_LENGTH_BYTES = 4


class TensorMembers(ctypes.Structure):
    """The members of Triton's tensor up to its size, in the compiler's memory layout.

    Source: `PbTensor` in src/pb_tensor.h of python_backend; `install` pins the binary.
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


def leave_undecoded(triton: ModuleType) -> None:
    """Disable the decoding of BYTES tensors in Triton's module, which crashes the process with numpy 2."""
    undecoded = SimpleNamespace(reshape=lambda shape: np.empty(shape, np.object_))  # Triton reshapes what it gets
    triton.deserialize_bytes_tensor = lambda _encoded: undecoded  # type: ignore[attr-defined]


def read(tensor: Any) -> NDArray[np.object_]:  # noqa: ANN401 - Triton's classes have no types
    """Read an undecoded input tensor as `bytes` in its shape; raise RuntimeError or ValueError for another memory layout."""
    # pybind11 stores the address of the C++ object after Python's object header.
    address = ctypes.c_void_p.from_address(id(tensor) + object.__basicsize__).value
    raw = TensorMembers.from_address(address or 0)
    if raw.datatype != _BYTES or ctypes.string_at(raw.name_address, raw.name_length).decode() != tensor.name():
        raise RuntimeError("BYTES tensors of this Triton cannot be read")
    elements = split(ctypes.string_at(raw.memory, raw.memory_bytes))
    array = np.empty(len(elements), np.object_)
    array[:] = elements
    return array.reshape(tensor.as_numpy().shape)


def split(encoded: bytes) -> list[bytes]:
    """Split the bytes of a tensor into elements, each preceded by its length (four bytes, little-endian)."""
    elements = []
    at = 0
    while at < len(encoded):
        start = at + _LENGTH_BYTES
        at = start + int.from_bytes(encoded[at:start], "little")
        elements.append(encoded[start:at])
    return elements
