"""Requests of KServe v2: what is none, and numbers in JSON."""

import re
from typing import Any

import msgspec
import numpy as np
import pytest

from app.api.dialects.kserve_tensors import InferRequest
from app.errors import MalformedRequest

HEAD = '{"inputs": [{"name": "image", "datatype": "FP32", "shape": [1], "data": '


@pytest.mark.parametrize(
    ("body", "length", "says"),
    [
        (HEAD + "[NaN]}]}", "", "expected a JSON object"),
        (HEAD + "[" * 100_000, "", "expected a JSON object"),
        ("{}", "3", "Inference-Header-Content-Length"),
        ("{}", "-1", "Inference-Header-Content-Length"),
        ("{}", "\xb2", "Inference-Header-Content-Length"),
        ("{}", "9" * 5000, "Inference-Header-Content-Length"),
        ('{"inputs": []}', "0", "expected a JSON object"),
        ('{"inputs": []}', "", "inputs is not as expected"),
        (HEAD + "[1]}]} ", str(len(HEAD) + 6), "nothing follows"),
    ],
)
def test_an_invalid_request_is_malformed(body: str, length: str, says: str) -> None:
    with pytest.raises(MalformedRequest, match=re.escape(says)):
        InferRequest.parse(body.encode(), length)


def read(data: str, count: int, dtype: Any = np.float32) -> Any:  # noqa: ANN401
    request = InferRequest.parse(f"{HEAD}{data}}}]}}".encode(), "")
    return request.read_numbers(np.dtype(dtype), count).tolist()


@pytest.mark.parametrize("is_nested", [False, True])
def test_numbers_are_read_in_pieces(is_nested: bool) -> None:  # noqa: FBT001
    numbers = np.arange(12_000, dtype=np.float32).reshape(3, 4000) / 7
    rows = [", ".join(f"{number:.40f}" for number in row) for row in numbers.tolist()]
    text = f"[[{'], ['.join(rows)}]]" if is_nested else f"[{','.join(rows)}]"
    assert read(text, 12_000) == numbers.ravel().tolist()


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        ("[1]", np.float32),
        ("[1, 2, 3]", np.float32),
        ("[1, [], 2]", np.float32),
        ('["0", 1]', np.float32),
        ("[null, 1]", np.float32),
        ("[true, 1]", np.float32),
        ("[1e39, 1]", np.float32),
        ("[70000, 1]", np.float16),
        ("[256, 1]", np.uint8),
        ("[-1, 1]", np.uint8),
        ("[0.5, 1]", np.uint8),
        ("[]", np.float32),
        ("{}", np.float32),
        (f"[{'1' * 500_000}, 1]", np.float32),
    ],
)
def test_data_other_than_two_numbers_of_the_type_is_malformed(data: str, dtype: Any) -> None:  # noqa: ANN401
    with pytest.raises(MalformedRequest, match="no list of 2 numbers"):
        read(data, 2, dtype)


def test_an_image_is_decoded_from_a_nested_list() -> None:
    own = {"name": "x", "datatype": "BYTES", "shape": [1, 1], "data": [["AAAA"]]}
    request = InferRequest.parse(msgspec.json.encode({"inputs": [own]}), "")
    assert (request.content, request.declared) == (b"\0\0\0", ("x", "BYTES", (1, 1)))
