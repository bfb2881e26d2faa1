"""The JSON of the responses, member by member."""

import json
from typing import Any

import msgspec
import pytest

from app.api.answering.schema import Detection, ModelInfo, Problem


def members(value: msgspec.Struct) -> dict[str, Any]:
    """Encode a value and parse the JSON, keeping the order of members."""
    parsed: dict[str, Any] = json.loads(msgspec.json.encode(value))
    return parsed


@pytest.mark.parametrize(
    ("box", "names"),
    [({"x1": 0.1, "y1": 0.2, "x2": 0.3, "y2": 0.4}, ["x1", "y1", "x2", "y2"]), ({"bbox": (1.0, 2.0, 3.0, 4.0)}, ["bbox"])],
)
def test_a_detection_has_either_corners_or_a_bbox(box: dict[str, Any], names: list[str]) -> None:
    """Members of the other format are left out, not null; `class` is a keyword in Python only."""
    detection = Detection(**box, confidence=0.5, class_=2, class_id=2, class_name="car")

    assert list(members(detection)) == [*names, "confidence", "class", "class_id", "class_name"]


def test_a_problem_has_the_members_of_rfc_9457_and_ours() -> None:
    """`code` is for programs, `request_id` for the log."""
    problem = Problem("urn:nereid:problem:x", "Title", 400, "detail", "x", "r1")

    assert list(members(problem)) == ["type", "title", "status", "detail", "code", "request_id"]


def test_a_model_that_is_not_ready_has_no_description() -> None:
    """Its members are there all the same, so that clients need not check for them."""
    assert members(ModelInfo("tiny", "not_ready")) == {
        "name": "tiny",
        "state": "not_ready",
        "version": None,
        "versions": [],
        "width": None,
        "height": None,
        "task": None,
        "output_format": None,
        "device": None,
        "classes": [],
        "source": None,
        "licence": None,
        "detail": None,
        "status": None,
        "backend": None,
        "max_batch_size": None,
        "has_labels": False,
        "num_classes": None,
        "input_shape": None,
    }
