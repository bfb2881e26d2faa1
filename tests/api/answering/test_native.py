"""Detections as JSON: boxes in the unit asked for, scores and names."""

from typing import Any, get_args

import msgspec
import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.api.answering.native import to_detections
from app.api.answering.schema import BoxFormat
from app.imaging.transform import ImageTransform
from app.pipeline.results import Detections
from tests.fakes.triton import SPEC

LABELS = ("person", "car", "traffic light")
LABELLED = msgspec.structs.replace(SPEC, labels=LABELS)
# A 200 x 100 image at half its size in the middle of a 100 x 100 canvas.
TRANSFORM = ImageTransform(0, 25, 100, 50, 200, 100)


def detections(boxes: list[list[float]], scores: list[float], class_ids: list[int]) -> Detections:
    corners = TRANSFORM.to_image(np.array(boxes, np.float32).reshape(-1, 4))
    return Detections(corners, np.array(scores, np.float32), np.array(class_ids, np.int32), 200, 100, LABELLED, "7")


def members(box: list[float], *, score: float = 0.5, id_: int = 0) -> dict[str, Any]:
    (detection,) = to_detections(detections([box], [score], [id_]), "normalized")
    parsed: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(detection))
    return parsed


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


def test_a_score_has_four_digits() -> None:
    assert members([0, 25, 1, 26], score=0.123456)["confidence"] == 0.1235
    assert members([0, 25, 1, 26], score=1.0005)["confidence"] == 1.0


def test_a_class_without_a_label_has_its_id_as_name() -> None:
    """A model may have more classes than labels, or no labels."""
    assert members([0, 25, 1, 26], id_=3)["class_name"] == "3"
    assert members([0, 25, 1, 26], id_=2)["class_name"] == "traffic light"
