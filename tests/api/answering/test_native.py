"""Detections as JSON: boxes in the unit asked for, scores and names."""

from typing import Any

import msgspec
import numpy as np
import pytest

from app.api.answering.native import to_detections
from app.api.answering.schema import BoxFormat
from app.imaging.transform import ImageTransform
from app.pipeline.call import Detections
from tests.fakes.triton import SPEC

LABELS = ("person", "car", "traffic light")
LABELLED = msgspec.structs.replace(SPEC, labels=LABELS)
# A 200 x 100 image at half its size in the middle of a 100 x 100 canvas.
TRANSFORM = ImageTransform(0, 25, 100, 50, 200, 100)


def detections(boxes: list[list[float]], scores: list[float], class_ids: list[int]) -> Detections:
    corners = TRANSFORM.to_image(np.array(boxes, np.float32).reshape(-1, 4))
    return Detections(corners, np.array(scores, np.float32), np.array(class_ids, np.int32), 200, 100, LABELLED, "7")


def members(box: list[float], *, score: float = 0.5, id_: int = 0, unit: BoxFormat = "normalized") -> dict[str, Any]:
    (detection,) = to_detections(detections([box], [score], [id_]), unit)
    parsed: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(detection))
    return parsed


INSIDE, ODD, OUTSIDE = [10.0, 35.0, 40.0, 65.0], [10 / 3, 25.0, 200 / 3, 25 + 10 / 3], [-5.0, 0.0, 105.0, 100.0]


@pytest.mark.parametrize(
    ("found", "unit", "box"),
    [
        (INSIDE, "normalized", {"x1": 0.1, "y1": 0.2, "x2": 0.4, "y2": 0.8}),
        (INSIDE, "pixel", {"x1": 20.0, "y1": 20.0, "x2": 80.0, "y2": 80.0}),
        (INSIDE, "coco", {"bbox": [20.0, 20.0, 60.0, 60.0]}),
        (INSIDE, "cxcywh", {"bbox": [50.0, 50.0, 60.0, 60.0]}),
        (ODD, "normalized", {"x1": 0.033333, "y1": 0.0, "x2": 0.666667, "y2": 0.066667}),
        (ODD, "pixel", {"x1": 6.67, "y1": 0.0, "x2": 133.33, "y2": 6.67}),
        (ODD, "coco", {"bbox": [6.67, 0.0, 126.67, 6.67]}),
        (ODD, "cxcywh", {"bbox": [70.0, 3.33, 126.67, 6.67]}),
        (OUTSIDE, "normalized", {"x1": 0.0, "y1": 0.0, "x2": 1.0, "y2": 1.0}),
        (OUTSIDE, "pixel", {"x1": 0.0, "y1": 0.0, "x2": 200.0, "y2": 100.0}),
        (OUTSIDE, "coco", {"bbox": [0.0, 0.0, 200.0, 100.0]}),
        (OUTSIDE, "cxcywh", {"bbox": [100.0, 50.0, 200.0, 100.0]}),
    ],
)
def test_a_box_has_the_unit_asked_for(found: list[float], unit: BoxFormat, box: dict[str, Any]) -> None:
    """Fractions have six digits and pixels two; a centre or width is rounded once, from the exact corners, inside the image."""
    detection = members(found, score=0.5, id_=2, unit=unit)

    assert detection == {**box, "confidence": 0.5, "class": 2, "class_id": 2, "class_name": "traffic light"}


def test_a_score_has_four_digits() -> None:
    assert members([0, 25, 1, 26], score=0.123456)["confidence"] == 0.1235
    assert members([0, 25, 1, 26], score=1.0005)["confidence"] == 1.0


def test_a_class_without_a_label_has_its_id_as_name() -> None:
    """A model may have more classes than labels, or no labels."""
    assert members([0, 25, 1, 26], id_=3)["class_name"] == "3"
    assert members([0, 25, 1, 26], id_=2)["class_name"] == "traffic light"
