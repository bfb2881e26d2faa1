"""Detections as JSON: boxes in the unit asked for, scores and names."""

from typing import get_args

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.api.answering.native import to_detections
from app.api.answering.schema import BoxFormat
from app.pipeline.results import Detections
from tests.fakes.triton import SPEC

LABELLED = msgspec.structs.replace(SPEC, labels=("person", "car", "traffic light"))


@given(st.lists(st.tuples(*[st.floats(0, 1)] * 4), max_size=4), st.integers(1, 16384), st.integers(1, 16384))
def test_all_units_describe_the_same_box(corners: list[list[float]], width: int, height: int) -> None:
    size = np.array([width, height] * 2, np.float32)
    boxes = np.sort(np.array(corners, np.float32).reshape(-1, 2, 2), axis=1).reshape(-1, 4) * size
    nothing = np.zeros(len(boxes))
    found = Detections(boxes, nothing.astype(np.float32), nothing.astype(np.int32), width, height, LABELLED, "7")
    exact = boxes.astype(np.float64)
    start, sides = exact[:, :2], exact[:, 2:] - exact[:, :2]
    expected = {
        "normalized": exact / size,
        "pixel": exact,
        "coco": np.hstack([start, sides]),
        "cxcywh": np.hstack([start + sides / 2, sides]),
    }
    for unit in get_args(BoxFormat):
        digits, most = (6, 1) if unit == "normalized" else (2, size)
        written = msgspec.to_builtins(to_detections(found, unit))
        values = [
            one["bbox"] if unit in {"coco", "cxcywh"} else [one[name] for name in ("x1", "y1", "x2", "y2")] for one in written
        ]
        numbers = np.array(values).reshape(-1, 4)
        np.testing.assert_allclose(numbers, expected[unit], rtol=0, atol=0.5001 * 10**-digits)
        assert (numbers == numbers.round(digits)).all()
        assert ((numbers >= 0) & (numbers <= most)).all()


def test_score_has_four_digits_and_a_class_without_a_label_its_id_as_name() -> None:
    """A model may have more classes than labels, or no labels."""
    scores, ids = np.array([1.0005, 0.123456], np.float32), np.array([2, 3], np.int32)
    found = Detections(np.zeros((2, 4), np.float32), scores, ids, 200, 100, LABELLED, "7")
    written = msgspec.to_builtins(to_detections(found, "normalized"))

    assert [(one["confidence"], one["class_name"]) for one in written] == [(1.0, "traffic light"), (0.1235, "3")]
