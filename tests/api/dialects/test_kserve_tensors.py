"""Numbers of KServe's tensors in JSON, which are read in pieces."""

from typing import Any

import numpy as np
import pytest

from app.api.dialects.kserve_tensors import InferRequest
from app.errors import MalformedRequest


def read(data: str, count: int, dtype: Any = np.float32) -> Any:  # noqa: ANN401
    document = f'{{"inputs": [{{"name": "image", "datatype": "FP32", "shape": [1], "data": {data}}}]}}'
    return InferRequest.parse(document.encode(), "").read_numbers(np.dtype(dtype), count).tolist()


def test_numbers_of_many_digits_are_read_in_pieces() -> None:
    numbers = np.arange(12_000, dtype=np.float32).reshape(3, 4000) / 7
    rows = [", ".join(f"{number:.40f}" for number in row) for row in numbers.tolist()]
    for text in (f"[[{'], ['.join(rows)}]]", f"[{','.join(rows)}]"):
        assert read(text, 12_000) == numbers.ravel().tolist()


@pytest.mark.parametrize(
    ("data", "dtype"),
    [
        ('["0", 1]', np.float32),
        ("[null, 1]", np.float32),
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
