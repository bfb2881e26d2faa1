"""Files inside Triton: read from the memory of Triton's own object, and decoded to the same pixels as in the gateway."""

import ctypes
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.embedded import bytes_tensor
from app.embedded.file_input import FileInput
from app.errors import UnsupportedModel
from app.imaging.fit import Letterbox
from tests.imaging.samples import FORMATS, PIXELS, draw, encode, exif_of, store

SIDE = 64
BYTES, UINT8 = 13, 2


def config(**parameters: str) -> dict[str, Any]:
    return {
        "name": "m",
        "max_batch_size": 4,
        "input": [{"name": "file", "data_type": "TYPE_STRING", "dims": ["1"]}],
        "output": [
            {"name": "output0", "data_type": "TYPE_FP32", "dims": ["300", "6"]},
            {"name": "decoded", "data_type": "TYPE_INT32", "dims": ["1"]},
        ],
        "parameters": {key: {"string_value": value} for key, value in ({"square": str(SIDE)} | parameters).items()},
    }


@pytest.mark.parametrize("image_format", FORMATS)
def test_pixels_are_those_of_the_gateway(image_format: str) -> None:
    file = encode(Image.fromarray(store(PIXELS, 6)), image_format, exif=exif_of(6))
    pixels, note = FileInput(config()).draw([file])
    expected = np.empty((SIDE, SIDE, 3), np.uint8)
    draw(file, Letterbox((SIDE, SIDE), "center", enlarge=True, pad=114), expected)
    np.testing.assert_array_equal(pixels[0], expected)
    np.testing.assert_array_equal(note["decoded"], np.array([[1]], np.int32))


def test_parameters_are_those_of_the_config() -> None:
    """The image lies where the gateway expects it when it maps boxes back."""
    file = encode(Image.fromarray(PIXELS), "PNG")
    pixels, _ = FileInput(config(placement="top_left", enlarge="false", pad="7")).draw([file])
    np.testing.assert_array_equal(pixels[0, :16, :32], PIXELS)
    assert (pixels[0, 16:] == 7).all()
    assert (pixels[0, :, 32:] == 7).all()
    unclear = config()
    del unclear["parameters"]["square"]
    with pytest.raises(UnsupportedModel, match="square"):
        FileInput(unclear)


@pytest.mark.parametrize("broken", [b"", b"text", encode(Image.fromarray(PIXELS), "PNG")[:-40]])
def test_file_that_cannot_be_decoded_harms_no_other(broken: bytes) -> None:
    good, reader = encode(Image.fromarray(PIXELS), "JPEG"), FileInput(config())
    pixels, note = reader.draw([good, broken, good])
    assert note["decoded"].tolist() == [[1], [0], [1]]
    assert (pixels[1] == 114).all()
    np.testing.assert_array_equal(pixels[[0, 2]], reader.draw([good, good])[0])


def encoded(*elements: bytes) -> bytes:
    return b"".join(len(element).to_bytes(4, "little") + element for element in elements)


class Tensor(bytes_tensor.TensorMembers):
    """Triton's tensor. As in pybind11, the address of its members is behind Python's header: ctypes has it there, too."""

    def __init__(self, content: bytes, shape: tuple[int, ...], *, datatype: int = BYTES, name: bytes = b"file") -> None:
        self.shape = shape
        self.buffers = ctypes.create_string_buffer(name), ctypes.create_string_buffer(content, len(content) + 1)
        address, memory = map(ctypes.addressof, self.buffers)
        size = len(content)
        super().__init__(name_address=address, name_length=len(name), datatype=datatype, memory=memory, memory_bytes=size)

    def name(self) -> str:
        return "file"

    def as_numpy(self) -> NDArray[np.object_]:
        triton: Any = ModuleType("triton_python_backend_utils")
        bytes_tensor.leave_undecoded(triton)
        array: NDArray[np.object_] = triton.deserialize_bytes_tensor(np.zeros(9, np.uint8)).reshape(list(self.shape))
        return array


@pytest.mark.parametrize("files", [[b"one"], [b"\0\0", b"", b"GIF89a" * 30_000]])
def test_elements_are_read_as_they_were_sent(files: list[bytes]) -> None:
    assert bytes_tensor.read(Tensor(encoded(*files), (len(files), 1))).tolist() == [[file] for file in files]


@pytest.mark.parametrize(
    ("tensor", "error"),
    [
        (Tensor(encoded(b"a", b"b"), (3, 1)), "cannot reshape"),
        (Tensor(encoded(b"a"), (1, 1), datatype=UINT8), "cannot be read"),
        (Tensor(encoded(b"a"), (1, 1), name=b"f"), "cannot be read"),
    ],
)
def test_object_that_is_laid_out_otherwise_is_an_error(tensor: Tensor, error: str) -> None:
    """Another Triton is noticed before anything is taken for an address of data."""
    with pytest.raises((RuntimeError, ValueError), match=error):
        bytes_tensor.read(tensor)
