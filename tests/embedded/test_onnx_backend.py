"""The backend that runs inside Triton, here with a stand-in for Triton's own module and the real onnxruntime."""

import ctypes
import gc
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx
import pytest
from numpy.typing import NDArray
from onnx import parser
from PIL import Image

from tests.imaging.samples import encode

Array = NDArray[Any]
Backend = Any
"""Triton's modules have no types."""
USED = ctypes.create_string_buffer(b"used_dlpack")

# Doubles every value, and adds up each row.
MODEL = """
<ir_version: 8, opset_import: ["": 17]>
small ({type}[batch, n] values) => ({type}[batch, n] doubled, {type}[batch] sums) {{
    doubled = Add (values, values)
    last = Constant <value_ints = [1]> ()
    sums = ReduceSum <keepdims = 0> (values, last)
}}"""

# Doubles every value, and returns the words as they are.
WORDS_MODEL = """
<ir_version: 8, opset_import: ["": 17]>
small (float[batch, n] values, string[batch, n] words) => (float[batch, n] doubled, string[batch, n] same) {
    doubled = Add (values, values)
    same = Identity (words)
}"""
# Returns the mean of each image.
PIXELS_MODEL = """
<ir_version: 8, opset_import: ["": 17]>
small (uint8[batch, 32, 32, 3] image) => (float[batch] means) {
    values = Cast <to = 1> (image)
    means = ReduceMean <axes = [1, 2, 3], keepdims = 0> (values)
}"""
TAKES_FILES = {
    "name": "m",
    "max_batch_size": 4,
    "input": [{"name": "file", "data_type": "TYPE_STRING", "dims": ["1"]}],
    "output": [
        {"name": "means", "data_type": "TYPE_FP32", "dims": ["300", "6"]},
        {"name": "decoded", "data_type": "TYPE_INT32", "dims": ["1"]},
    ],
    "parameters": {"square": {"string_value": "32"}},
}
WORDS = np.array([["a", "b"]], np.object_)
VALUES = np.ones((1, 2), np.float32)


class Consumer:
    """Passes a DLPack capsule on to numpy."""

    def __init__(self, capsule: object) -> None:
        self.capsule = capsule

    def __dlpack__(self, **_: object) -> Any:  # noqa: ANN401
        return self.capsule

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0  # the CPU


class Tensor:
    """Triton's tensor. Its own conversions of numbers lose the data under numpy 2, which shows only in empty results."""

    def __init__(self, name: str, array: Array) -> None:
        self.name = name
        self.array = array if array.dtype == np.object_ else np.empty(0, array.dtype)

    @classmethod
    def from_dlpack(cls, name: str, capsule: object) -> "Tensor":
        """Consume a capsule as Triton does, which gives it another name than the DLPack standard."""
        array = np.from_dlpack(Consumer(capsule))
        ctypes.pythonapi.PyCapsule_SetName(ctypes.py_object(capsule), USED)
        assert array.flags.c_contiguous, "Triton reads the memory from one end to the other"
        tensor = cls(name, array)
        tensor.array = array
        return tensor

    def as_numpy(self) -> Array:
        return self.array if self.array.dtype == np.object_ else np.empty(0, self.array.dtype)

    def __dlpack__(self, **options: Any) -> Any:  # noqa: ANN401
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


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


def load(
    backend: Backend, folder: Path, element: str = "float", version: str = "1", text: str = MODEL, **parameters: str
) -> Backend:
    """Write a model repository with a small model, and load it."""
    (folder / version).mkdir(exist_ok=True)
    onnx.save(parser.parse_model(text.format(type=element) if text == MODEL else text), folder / version / "model.onnx")
    given = {"parameters": {key: {"string_value": value} for key, value in parameters.items()}} if parameters else {}
    config = TAKES_FILES if text == PIXELS_MODEL else given
    model = backend.TritonPythonModel()
    model.initialize({"model_config": json.dumps(config), "model_repository": str(folder), "model_version": version})
    return model


@pytest.mark.parametrize(("element", "dtype"), [("float", np.float32), ("float16", np.float16), ("double", np.float64)])
def test_requests_are_executed_as_one_batch(backend: Backend, tmp_path: Path, element: str, dtype: type) -> None:
    model = load(backend, tmp_path, element)
    batches: list[Array] = [np.full((size, 3), size).astype(dtype) for size in (1, 3, 2)]
    for requests in (batches[:1], batches):
        responses = model.execute([request(batch) for batch in requests])
        assert [response.error for response in responses] == [None] * len(requests)
        for response, batch in zip(responses, requests, strict=True):
            np.testing.assert_array_equal(response.outputs["doubled"], batch * 2)
            np.testing.assert_array_equal(response.outputs["sums"], batch.sum(axis=1))


def test_outputs_outlive_the_backends_own_arrays_and_nothing_is_reported(backend: Backend, tmp_path: Path) -> None:
    """A tensor keeps its memory until Triton releases it.

    Numpy does not take Triton's name of a consumed capsule for an error, which it would print for every tensor.
    """
    model, reported = load(backend, tmp_path), list[object]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "unraisablehook", reported.append)
        responses = [model.execute([request(np.full((1, 1000), n, np.float32))])[0] for n in range(50)]
        model.execute([request(VALUES), request(VALUES)])
        del model
        gc.collect()
    assert [response.outputs["sums"].item() for response in responses] == [1000.0 * n for n in range(50)]
    assert reported == []


def converted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the names of the outputs that are converted to Triton's tensors from now on."""
    names: list[str] = []
    create = Tensor.from_dlpack

    def from_dlpack(name: str, capsule: object) -> Tensor:
        names.append(name)
        return create(name, capsule)

    monkeypatch.setattr(Tensor, "from_dlpack", from_dlpack)
    return names


def test_each_request_gets_the_outputs_it_requested_and_no_other_is_converted(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = converted(monkeypatch)
    model, values = load(backend, tmp_path), [np.full((1, 3), value, np.float32) for value in range(3)]
    (alone,) = model.execute([Request("sums", values=values[1])])
    assert (names, list(alone.outputs)) == (["sums"], ["sums"])
    names.clear()
    responses = model.execute([Request("sums", values=values[0]), Request("doubled", values=values[1]), request(values[2])])
    assert [list(response.outputs) for response in responses] == [["sums"], ["doubled"], ["doubled", "sums"]]
    assert names == ["sums", "doubled", "doubled", "sums"]
    np.testing.assert_array_equal(responses[1].outputs["doubled"], values[1] * 2)
    assert [response.outputs["sums"].item() for response in (responses[0], responses[2])] == [0, 6]


@pytest.mark.parametrize(("outputs", "number"), [(["doubled"], 1), (["doubled"], 2), (["doubled", "same"], 1)])
def test_string_output_is_returned_as_it_is_to_whoever_requests_it(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outputs: list[str], number: int
) -> None:
    """DLPack has no strings."""
    names = converted(monkeypatch)
    model = load(backend, tmp_path, text=WORDS_MODEL)
    for response in model.execute([Request(*outputs, values=VALUES, words=WORDS) for _ in range(number)]):
        assert (response.error, list(response.outputs)) == (None, outputs)
        np.testing.assert_array_equal(response.outputs["doubled"], VALUES * 2)
        assert response.outputs.get("same", WORDS).tolist() == [["a", "b"]]
    assert names == ["doubled"] * number


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
    model = load(backend, tmp_path, text=PIXELS_MODEL)
    requests = [Request("means", "decoded", file=files(plain(10), b"text", plain(30)))]
    requests += [Request("decoded", "means", file=files(plain(40 + other))) for other in range(others)]
    first, *rest = model.execute(requests)
    assert first.outputs["decoded"].tolist() == [[1], [0], [1]]
    assert first.outputs["means"].tolist() == [10, 114, 30]
    assert [answer.outputs["means"].tolist() for answer in rest] == [[40 + other] for other in range(others)]
    assert all(answer.outputs["decoded"].tolist() == [[1]] for answer in rest)
    (answer,) = model.execute([Request("means", file=files(plain(10)))])
    assert list(answer.outputs) == ["means"]


@pytest.mark.parametrize(("parameters", "threads"), [({"intra_op_thread_count": "2"}, 2), ({"labels": "a,b"}, 1)])
def test_threads_and_the_version_are_those_that_are_asked_for(
    backend: Backend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parameters: dict[str, str], threads: int
) -> None:
    seen: list[tuple[str, int, int, list[str]]] = []
    create = backend.onnxruntime.InferenceSession

    def record(file: Path, options: Any, providers: list[str]) -> Any:  # noqa: ANN401
        seen.append((file.parent.name, options.intra_op_num_threads, options.inter_op_num_threads, providers))
        return create(file, options, providers=providers)

    monkeypatch.setattr(backend.onnxruntime, "InferenceSession", record)
    load(backend, tmp_path, version="7", **parameters)
    assert seen == [("7", threads, 1, ["CPUExecutionProvider"])]
