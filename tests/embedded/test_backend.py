"""The backend that runs inside Triton, here with a stand-in for Triton's own module and the real onnxruntime, and files there."""

import ctypes
import gc
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from PIL import Image

from app.embedded.file_input import FileInput
from app.errors import UnsupportedModel
from app.imaging.fit import Letterbox
from tests.imaging.samples import FORMATS, PIXELS, draw, encode, exif_of, store
from tests.model.configs import FILE, SIX_COLUMNS, config, table
from tests.zoo.exported import parse

Array = NDArray[Any]
Backend = Any
"""Triton's modules have no types."""
CPU = 1, 0
USED = ctypes.create_string_buffer(b"used_dlpack")

# Doubles every value, and adds up each row.
MODEL = """
small (float[batch, n] values) => (float[batch, n] doubled, float[batch] sums) {
    doubled = Add (values, values)
    last = Constant <value_ints = [1]> ()
    sums = ReduceSum <keepdims = 0> (values, last)
}"""
# Returns the mean of each image.
PIXELS_MODEL = """
small (uint8[batch, 32, 32, 3] image) => (float[batch] means) {
    values = Cast <to = 1> (image)
    means = ReduceMean <axes = [1, 2, 3], keepdims = 0> (values)
}"""


def takes_files(**parameters: str) -> dict[str, Any]:
    return config(SIX_COLUMNS, table(1, name="decoded", data_type="TYPE_INT32"), image=FILE, batch=4, **parameters)


class Tensor:
    """Triton's tensor. Its own conversions of numbers lose the data under numpy 2, which shows only in empty results."""

    converted: ClassVar[list[str]] = []
    """Names of the outputs that were made of the backend's arrays."""

    def __init__(self, name: str, array: Array) -> None:
        self.name = name
        self.array = array if array.dtype == np.object_ else np.empty(0, array.dtype)

    @classmethod
    def from_dlpack(cls, name: str, capsule: object) -> "Tensor":
        """Consume a capsule as Triton does, which gives it another name than the DLPack standard."""
        array: Array = np.from_dlpack(SimpleNamespace(__dlpack__=lambda **_: capsule, __dlpack_device__=lambda: CPU))
        ctypes.pythonapi.PyCapsule_SetName(ctypes.py_object(capsule), USED)
        assert array.flags.c_contiguous, "Triton reads the memory from one end to the other"
        tensor = cls(name, array)
        tensor.array = array
        cls.converted.append(name)
        return tensor

    def __dlpack__(self, **options: Any) -> Any:  # noqa: ANN401
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return CPU


class TritonError(Exception):
    """Triton's error, which belongs to one response."""


class Response:
    def __init__(self, output_tensors: list[Tensor] | None = None, error: TritonError | None = None) -> None:
        self.outputs = {tensor.name: tensor.array for tensor in output_tensors or []}
        self.error = error


class Request:
    def __init__(self, *outputs: str, **inputs: Array) -> None:
        self.outputs = list(outputs)
        self.inputs = {}
        for name, array in inputs.items():
            self.inputs[name] = Tensor(name, array)
            self.inputs[name].array = array

    def requested_output_names(self) -> list[str]:
        return self.outputs


def request(values: Array) -> Request:
    return Request("doubled", "sums", values=values)


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Import the backend as Triton does: its own module exists, but has no `Tensor` yet."""
    name = "app.embedded.onnx_backend"
    triton: Any = ModuleType("triton_python_backend_utils")
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", triton)
    monkeypatch.delitem(sys.modules, name, raising=False)
    module = importlib.import_module(name)
    triton.Tensor, triton.InferenceResponse, triton.TritonError = Tensor, Response, TritonError
    triton.get_input_tensor_by_name = lambda request, name: request.inputs.get(name)
    monkeypatch.setattr(module.bytes_tensor, "read", lambda tensor: tensor.array)
    yield module
    sys.modules.pop(name, None)


def load(backend: Backend, folder: Path, text: str = MODEL) -> Backend:
    (folder / "1").mkdir()
    onnx.save(parse(text), folder / "1" / "model.onnx")
    given = takes_files(square="32") if text == PIXELS_MODEL else {}
    model = backend.TritonPythonModel()
    model.initialize({"model_config": json.dumps(given), "model_repository": str(folder), "model_version": "1"})
    return model


def test_requests_are_executed_as_one_batch(backend: Backend, tmp_path: Path) -> None:
    """A tensor keeps its memory until Triton releases it."""
    model = load(backend, tmp_path)
    batches: list[Array] = [np.full((size, 3), size, np.float32) for size in (1, 3, 2)]
    done = [(requests, model.execute([request(batch) for batch in requests])) for requests in [batches[:1], batches] * 20]
    del model
    gc.collect()
    for requests, responses in done:
        assert [response.error for response in responses] == [None] * len(requests)
        for response, batch in zip(responses, requests, strict=True):
            np.testing.assert_array_equal(response.outputs["doubled"], batch * 2)
            np.testing.assert_array_equal(response.outputs["sums"], batch.sum(axis=1))


def test_each_request_gets_the_outputs_it_requested_and_no_other_is_converted(backend: Backend, tmp_path: Path) -> None:
    model, values = load(backend, tmp_path), [np.full((1, 3), value, np.float32) for value in range(3)]
    Tensor.converted.clear()
    responses = model.execute([Request("sums", values=values[0]), Request("doubled", values=values[1]), request(values[2])])
    assert [list(response.outputs) for response in responses] == [["sums"], ["doubled"], ["doubled", "sums"]]
    assert Tensor.converted == ["sums", "doubled", "doubled", "sums"]
    np.testing.assert_array_equal(responses[1].outputs["doubled"], values[1] * 2)
    assert [response.outputs["sums"].item() for response in (responses[0], responses[2])] == [0, 6]


def assert_all_fail(responses: list[Response], number: int) -> None:
    assert len(responses) == number
    assert all(isinstance(response.error, TritonError) and str(response.error) for response in responses)
    assert all(response.outputs == {} for response in responses)


def test_request_that_fails_costs_no_other(backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception does not leave the backend, where it would leak Triton's shared memory; those beside it run alone.

    So do those that do not fit together: a network may take pictures of any size, but those of a batch have one.
    """
    model = load(backend, tmp_path)
    good = request(np.ones((1, 3), np.float32))
    for wrong in (request(np.zeros((1, 3), np.int32)), Request("doubled")):
        assert_all_fail(model.execute([wrong]), 1)
        first, failed, last = model.execute([good, wrong, request(np.ones((1, 4), np.float32))])
        assert_all_fail([failed], 1)
        assert [response.outputs["sums"] for response in (first, last)] == [[3], [4]]

    def from_dlpack(name: str, _: object) -> Tensor:
        raise RuntimeError(f"{name} cannot be converted")

    monkeypatch.setattr(Tensor, "from_dlpack", from_dlpack)
    for number in (1, 3):
        assert_all_fail(responses := model.execute([good] * number), number)
        assert {str(response.error) for response in responses} == {"doubled cannot be converted"}


def plain(level: int) -> bytes:
    return encode(Image.new("RGB", (8, 8), (level, level, level)), "PNG")


def files(*elements: bytes) -> Array:
    return np.array(elements, np.object_)[:, None]


@pytest.mark.parametrize("others", [0, 2])
def test_files_become_the_pixels_that_the_network_takes(backend: Backend, tmp_path: Path, others: int) -> None:
    model = load(backend, tmp_path, PIXELS_MODEL)
    requests = [Request("means", "decoded", file=files(plain(10), b"text", plain(30)))]
    requests += [Request("decoded", "means", file=files(plain(40 + other))) for other in range(others)]
    first, *rest = model.execute(requests)
    assert first.outputs["decoded"].tolist() == [[1], [0], [1]]
    assert first.outputs["means"].tolist() == [10, 114, 30]
    assert [answer.outputs["means"].tolist() for answer in rest] == [[40 + other] for other in range(others)]
    assert all(answer.outputs["decoded"].tolist() == [[1]] for answer in rest)
    (answer,) = model.execute([Request("means", file=files(plain(10)))])
    assert list(answer.outputs) == ["means"]


@pytest.mark.parametrize("image_format", FORMATS)
def test_pixels_are_those_of_the_gateway(image_format: str) -> None:
    file = encode(Image.fromarray(store(PIXELS, 6)), image_format, exif=exif_of(6))
    pixels, note = FileInput(takes_files(square="64")).draw([file])
    expected = np.empty((64, 64, 3), np.uint8)
    draw(file, Letterbox((64, 64), "center", enlarge=True, pad=114), expected)
    np.testing.assert_array_equal(pixels[0], expected)
    np.testing.assert_array_equal(note["decoded"], np.array([[1]], np.int32))


def test_parameters_are_those_of_the_config() -> None:
    """The image lies where the gateway expects it when it maps boxes back."""
    file = encode(Image.fromarray(PIXELS), "PNG")
    pixels, _ = FileInput(takes_files(square="64", placement="top_left", enlarge="false", pad="7")).draw([file])
    np.testing.assert_array_equal(pixels[0, :16, :32], PIXELS)
    assert (pixels[0, 16:] == 7).all()
    assert (pixels[0, :, 32:] == 7).all()
    with pytest.raises(UnsupportedModel, match="square"):
        FileInput(takes_files())
