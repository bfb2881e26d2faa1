"""Reading BYTES tensors from the memory of Triton's own object; tests of the real one are in tests/system."""

import ctypes
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from app.embedded import bytes_tensor

BYTES, UINT8 = 13, 2


def encode(*elements: bytes) -> bytes:
    return b"".join(len(element).to_bytes(4, "little") + element for element in elements)


class Tensor(bytes_tensor.TensorMembers):
    """Triton's tensor. As in pybind11, the address of its members is behind Python's header: ctypes has it there, too."""

    def __init__(self, encoded: bytes, shape: tuple[int, ...], *, datatype: int = BYTES, name: bytes = b"file") -> None:
        self.shape = shape
        self.buffers = ctypes.create_string_buffer(name), ctypes.create_string_buffer(encoded, len(encoded) + 1)
        name_address, memory = map(ctypes.addressof, self.buffers)
        super().__init__(
            name_address=name_address, name_length=len(name), datatype=datatype, memory=memory, memory_bytes=len(encoded)
        )

    def name(self) -> str:
        return "file"

    def as_numpy(self) -> NDArray[np.object_]:
        triton: Any = ModuleType("triton_python_backend_utils")
        bytes_tensor.leave_undecoded(triton)
        array: NDArray[np.object_] = triton.deserialize_bytes_tensor(np.zeros(9, np.uint8)).reshape(list(self.shape))
        return array


@pytest.mark.parametrize("files", [[b"one"], [b"\0\0", b"", b"GIF89a" * 30_000]])
def test_elements_are_read_as_they_were_sent(files: list[bytes]) -> None:
    read = bytes_tensor.read(Tensor(encode(*files), (len(files), 1)))

    assert read.tolist() == [[file] for file in files]


def test_another_number_of_elements_than_the_shape_says_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot reshape"):
        bytes_tensor.read(Tensor(encode(b"a", b"b"), (3, 1)))


@pytest.mark.parametrize("tensor", [Tensor(encode(b"a"), (1, 1), datatype=UINT8), Tensor(encode(b"a"), (1, 1), name=b"f")])
def test_an_object_that_is_laid_out_otherwise_is_an_error(tensor: Tensor) -> None:
    """Another Triton is noticed before anything is taken for an address of data."""
    with pytest.raises(RuntimeError, match="cannot be read"):
        bytes_tensor.read(tensor)
