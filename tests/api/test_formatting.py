"""Choosing rows, and saying what they are."""

from typing import Any

import msgspec
import numpy as np
import pytest

from app.detections import class_ids, name, select
from app.errors import InvalidParameter
from app.letterbox import Placement
from app.rows import Rows
from app.schema import Unit

LABELS = ("person", "car", "traffic light")
# A 200 x 100 picture at half its size in the middle of a 100 x 100 frame.
PLACEMENT = Placement(0, 25, 100, 50, 200, 100)


def rows(*scores: float, classes: list[int] | None = None) -> Rows:
    """Make rows whose box tells their index."""
    boxes = np.arange(len(scores), dtype=np.float32)[:, None] + np.zeros((1, 4), np.float32)
    return Rows(boxes, np.array(scores, np.float32), np.array(classes or [0] * len(scores), np.int32))


def chosen(found: Rows) -> list[int]:
    return [int(x) for x in found.boxes[:, 0]]


def named(box: list[float], *, score: float = 0.5, id_: int = 0, unit: Unit = "normalized") -> dict[str, Any]:
    found = Rows(np.array([box], np.float32), np.array([score], np.float32), np.array([id_], np.int32))
    (detection,) = name(found, PLACEMENT, LABELS, unit)
    told: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(detection))
    return told


@pytest.mark.parametrize("confidence", [0.0, 0.25, 0.3, 1.0])
def test_confidence_is_the_least_score(confidence: float) -> None:
    """A score equal to the threshold stays, the next smaller float goes."""
    at = np.float32(confidence)
    below = np.nextafter(at, np.float32(-1))

    assert chosen(select(rows(float(at), float(below)), confidence=confidence, classes=None, limit=10)) == [0]


def test_best_come_first() -> None:
    """Rows are ordered by falling score."""
    found = select(rows(0.5, 0.9, 0.6, 0.7), confidence=0.1, classes=None, limit=10)

    assert chosen(found) == [1, 3, 2, 0]
    np.testing.assert_array_equal(found.scores, np.array([0.9, 0.7, 0.6, 0.5], np.float32))


def test_equal_scores_keep_their_order() -> None:
    """Many rows of two scores come out as two runs, each in the order of the model."""
    found = select(rows(*[0.5, 0.9] * 100), confidence=0.1, classes=None, limit=300)

    assert chosen(found) == [*range(1, 200, 2), *range(0, 200, 2)]


def test_limit_keeps_the_best() -> None:
    """Of more rows than asked for the best are taken."""
    assert chosen(select(rows(0.5, 0.9, 0.7), confidence=0.1, classes=None, limit=2)) == [1, 2]


def test_only_wanted_classes_stay() -> None:
    """Rows of other classes are dropped before the limit counts."""
    found = select(rows(0.9, 0.8, 0.7, 0.6, classes=[0, 1, 2, 1]), confidence=0.1, classes=frozenset({1, 2}), limit=2)

    assert chosen(found) == [1, 2]
    assert found.classes.tolist() == [1, 2]


def test_no_class_is_no_row() -> None:
    """An empty set of classes keeps nothing."""
    assert chosen(select(rows(0.9, 0.8), confidence=0.1, classes=frozenset(), limit=2)) == []


def test_nothing_stays_of_nothing() -> None:
    """An empty answer is empty rows of the right shape."""
    assert select(rows(), confidence=0.1, classes=frozenset({1}), limit=2).boxes.shape == (0, 4)


@pytest.mark.parametrize(
    ("wanted", "ids"),
    [
        (["person"], {0}),
        (["traffic light", "car"], {1, 2}),
        (["2"], {2}),
        (["0", "person"], {0}),
        (["02"], {2}),
        ([], set()),
    ],
)
def test_classes_are_names_or_ids(wanted: list[str], ids: set[int]) -> None:
    """A class may be given either way."""
    assert class_ids(wanted, LABELS) == ids


def test_name_counts_before_id() -> None:
    """A model whose labels are numbers is asked by label."""
    assert class_ids(["5"], ["7", "5"]) == {1}


@pytest.mark.parametrize("labels", [(), LABELS])
@pytest.mark.parametrize("wanted", ["Person", "", "-1", "1.0", "²", "٣", "1_0", "0x1", "+1", "9" * 5000])
def test_other_classes_are_unknown(wanted: str, labels: tuple[str, ...]) -> None:
    """What is neither name nor id is refused and quoted, not all of it."""
    with pytest.raises(InvalidParameter) as caught:
        class_ids(["0", wanted], labels)

    assert caught.value.detail == f"classes: {wanted[:64]!r} is not a class of this model"


def test_id_beyond_the_labels_is_unknown() -> None:
    """A labelled model has no more classes than labels."""
    assert class_ids(["2"], LABELS) == {2}

    with pytest.raises(InvalidParameter, match="classes: '3' is not a class of this model"):
        class_ids(["3"], LABELS)


def test_any_id_is_a_class_of_a_model_without_labels() -> None:
    """Where no labels are known, ids are not checked."""
    assert class_ids(["0", "79", "100000"], ()) == {0, 79, 100000}


def test_id_no_row_can_have_finds_nothing() -> None:
    """A number beyond all integers is compared, not stumbled over."""
    found = select(rows(0.9, classes=[1]), confidence=0.1, classes=frozenset({1, 10**30}), limit=5)

    assert chosen(found) == [0]


@pytest.mark.parametrize(
    ("unit", "box"),
    [
        ("normalized", {"x1": 0.1, "y1": 0.2, "x2": 0.4, "y2": 0.8}),
        ("pixel", {"x1": 20.0, "y1": 20.0, "x2": 80.0, "y2": 80.0}),
        ("coco", {"bbox": [20.0, 20.0, 60.0, 60.0]}),
    ],
)
def test_box_is_told_in_the_unit_asked_for(unit: Unit, box: dict[str, Any]) -> None:
    """Corners as fractions, corners in pixels, or COCO's x, y, width, height, and nothing else."""
    detection = named([10, 35, 40, 65], score=0.5, id_=2, unit=unit)

    assert detection == {**box, "confidence": 0.5, "class": 2, "class_id": 2, "class_name": "traffic light"}


def test_score_has_four_digits() -> None:
    """Scores are rounded, and never above one."""
    assert named([0, 25, 1, 26], score=0.123456)["confidence"] == 0.1235
    assert named([0, 25, 1, 26], score=1.0005)["confidence"] == 1.0


@pytest.mark.parametrize(
    ("unit", "box"),
    [
        ("normalized", {"x1": 0.033333, "y1": 0.0, "x2": 0.666667, "y2": 0.066667}),
        ("pixel", {"x1": 6.67, "y1": 0.0, "x2": 133.33, "y2": 6.67}),
        ("coco", {"bbox": [6.67, 0.0, 126.67, 6.67]}),
    ],
)
def test_box_is_rounded(unit: Unit, box: dict[str, Any]) -> None:
    """Fractions have six digits and pixels two; a COCO width is rounded once, from the exact corners."""
    detection = named([10 / 3, 25, 200 / 3, 25 + 10 / 3], unit=unit)

    assert {key: detection[key] for key in box} == box


@pytest.mark.parametrize(
    ("unit", "box"),
    [
        ("normalized", {"x1": 0.0, "y1": 0.0, "x2": 1.0, "y2": 1.0}),
        ("pixel", {"x1": 0.0, "y1": 0.0, "x2": 200.0, "y2": 100.0}),
        ("coco", {"bbox": [0.0, 0.0, 200.0, 100.0]}),
    ],
)
def test_box_ends_at_the_picture(unit: Unit, box: dict[str, Any]) -> None:
    """What reaches into the padding is clipped."""
    detection = named([-5, 0, 105, 100], unit=unit)

    assert {key: detection[key] for key in box} == box


def test_class_without_a_label_is_its_id() -> None:
    """An id beyond the labels is its own name."""
    assert named([0, 25, 1, 26], id_=3)["class_name"] == "3"
    assert named([0, 25, 1, 26], id_=2)["class_name"] == "traffic light"


@pytest.mark.parametrize("unit", ["normalized", "pixel", "coco"])
def test_detections_keep_their_order(unit: Unit) -> None:
    """Each row becomes one detection, none becomes none."""
    found = name(rows(0.9, 0.4, classes=[1, 0]), PLACEMENT, LABELS, unit)

    assert [(one.class_name, one.confidence) for one in found] == [("car", 0.9), ("person", 0.4)]
    assert name(rows(), PLACEMENT, LABELS, unit) == []
