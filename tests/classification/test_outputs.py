"""A classifier's output to probabilities, and invalid outputs to errors."""

import math
from typing import Any

import msgspec
import numpy as np
import pytest
from numpy.typing import NDArray

from app.classification.outputs import decode_outputs
from app.errors import InvalidImage, InvalidModelOutput, WrongTask
from app.model.heads import ClassificationHead
from app.model.spec import ModelSpec, from_triton_config
from tests.fakes.triton import SPEC as DETECTOR

LOGITS = from_triton_config(
    {
        "name": "m",
        "max_batch_size": 4,
        "input": [{"name": "image", "data_type": "TYPE_UINT8", "dims": [32, 32, 3]}],
        "output": [{"name": "o", "data_type": "TYPE_FP32", "dims": [3]}],
    },
    "1",
)
PROBABILITIES = msgspec.structs.replace(LOGITS, head=ClassificationHead(classes=3, scores="probabilities"))
UNCOUNTED = msgspec.structs.replace(LOGITS, head=ClassificationHead(classes=-1, scores="logits"))
HALF = msgspec.structs.replace(LOGITS, output_dtypes=(np.dtype("f2"),))


def decode(spec: ModelSpec, *scores: float, dtype: str = "f4") -> NDArray[np.float32]:
    return decode_outputs(spec, {"o": np.array([scores], dtype)})


def test_logits_become_probabilities() -> None:
    found = decode(LOGITS, 0, math.log(2), math.log(5))

    assert found.dtype == np.float32
    assert found.tolist() == pytest.approx([1 / 8, 2 / 8, 5 / 8])


@pytest.mark.parametrize(("spec", "dtype", "most"), [(LOGITS, "f4", 3e38), (HALF, "f2", 6e4)])
def test_large_logits_do_not_overflow(spec: ModelSpec, dtype: str, most: float) -> None:
    """The softmax depends on differences only."""
    assert decode(spec, -most, most, most, dtype=dtype).tolist() == [0, 0.5, 0.5]


def test_probabilities_stay_as_they_are() -> None:
    """They need not add up to one, as those of a model that may choose several classes; rounding above one is cut."""
    assert decode(PROBABILITIES, 0.5, 0.75, 1.0005).tolist() == [0.5, 0.75, 1]


def test_a_model_may_leave_the_number_of_classes_open() -> None:
    assert decode(UNCOUNTED, *[1.0] * 5).tolist() == pytest.approx([0.2] * 5)


def test_a_model_without_a_batch_dimension() -> None:
    spec = msgspec.structs.replace(LOGITS, has_batch_dimension=False)

    assert decode_outputs(spec, {"o": np.zeros(3, np.float32)}).tolist() == pytest.approx([1 / 3] * 3)


@pytest.mark.parametrize(
    ("spec", "tensor", "message"),
    [
        (LOGITS, np.zeros((1, 4), np.float32), "of shape (4,), expected (3,)"),
        (LOGITS, np.zeros((1, 3, 1), np.float32), "of shape (3, 1), expected (3,)"),
        (LOGITS, np.zeros((2, 3), np.float32), "of shape (2, 3) for one image"),
        (LOGITS, np.zeros((), np.float32), "of shape () for one image"),
        (LOGITS, np.zeros((1, 3), np.float16), "as float16, expected float32"),
        (UNCOUNTED, np.zeros((1, 0), np.float32), "no scores"),
        *(
            (spec, np.array([[0, bad, 0]], np.float32), "not finite")
            for spec in (LOGITS, PROBABILITIES)
            for bad in (np.nan, np.inf)
        ),
        (PROBABILITIES, np.array([[0, 0, -0.1]], np.float32), "outside 0 to 1"),
        (PROBABILITIES, np.array([[0, 0, 7.5]], np.float32), "outside 0 to 1, though its config says `scores: probabilities`"),
    ],
)
def test_an_invalid_output_is_rejected(spec: ModelSpec, tensor: NDArray[Any], message: str) -> None:
    with pytest.raises(InvalidModelOutput) as caught:
        decode_outputs(spec, {"o": tensor})

    assert caught.value.detail.startswith("m returned ")
    assert message in caught.value.detail


def test_a_missing_output_is_rejected() -> None:
    with pytest.raises(InvalidModelOutput, match=r"^m did not return o$"):
        decode_outputs(LOGITS, {"other": np.zeros((1, 3), np.float32)})


def test_an_image_that_the_model_could_not_decode_is_rejected() -> None:
    """The model takes the encoded file, so the caller is to blame."""
    spec = msgspec.structs.replace(LOGITS, tells_decoded=True)
    with pytest.raises(InvalidImage):
        decode_outputs(spec, {"o": np.zeros((1, 3), np.float32), "decoded": np.array([[0]], np.int32)})


def test_a_detector_has_no_probabilities() -> None:
    with pytest.raises(WrongTask):
        decode_outputs(DETECTOR, {})
