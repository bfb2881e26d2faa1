"""The comparison of two answers to the same question, by boxes made by hand."""

from collections import Counter

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.model.spec import ModelSpec
from app.pipeline.results import Classifications, Detections, Embedding, TaskResult
from app.routing.comparison import compare
from tests.fakes.triton import SPEC

ANIMALS = msgspec.structs.replace(SPEC, labels=("cat", "dog"))
OTHERS = msgspec.structs.replace(SPEC, labels=("bird", "cat"))
HERE, NEAR, FAR = (0, 0, 10, 10), (0, 0, 10, 8), (20, 20, 30, 30)
NOTHING = ((5, 5, 5, 5), 0.5, 0)
Box = tuple[tuple[float, ...], float, int]
"""A box, its score and its class."""


def answer(*boxes: Box, spec: ModelSpec = ANIMALS) -> Detections:
    places, scores, class_ids = zip(*boxes, strict=True) if boxes else ((), (), ())
    return Detections(
        np.array(places, np.float32).reshape(-1, 4), np.array(scores, np.float32), np.array(class_ids, np.int32), 40, 40, spec, "1"
    )


def classified(*class_ids: int, spec: ModelSpec = ANIMALS) -> Classifications:
    return Classifications(np.array(class_ids, np.int32), np.array([0.75, 0.25][: len(class_ids)], np.float32), 40, 40, spec, "1")


def described(*vector: float) -> Embedding:
    return Embedding(np.array(vector, np.float32), 1.0, 40, 40, ANIMALS, "1")


def test_boxes_match_by_class_and_overlap() -> None:
    first = answer((HERE, 0.75, 0), (FAR, 0.5, 1))
    found = compare(first, answer((FAR, 0.25, 0), (NEAR, 0.5, 0)))

    (match,) = found.matches
    assert (match.label, match.scores) == ("cat", (0.75, 0.5))
    assert match.iou == pytest.approx(0.8)
    assert (found.missing, found.additional) == (Counter(dog=1), Counter(cat=1))
    assert found.agreement == pytest.approx(1 / 3)


def test_classes_match_by_name() -> None:
    """The same class may have another number in another model."""
    found = compare(answer((HERE, 0.75, 0)), answer((HERE, 0.75, 1), (HERE, 0.5, 0), spec=OTHERS))

    assert [match.label for match in found.matches] == ["cat"]
    assert (found.missing, found.additional) == (Counter(), Counter(bird=1))


def test_box_matches_once_and_the_best_overlap_comes_first() -> None:
    found = compare(answer((HERE, 0.5, 0)), answer((NEAR, 0.75, 0), (HERE, 0.25, 0)))

    assert [match.iou for match in found.matches] == [1]
    assert found.additional == Counter(cat=1)


@pytest.mark.parametrize(
    ("first", "second", "agreement"),
    [
        (classified(0, 1), classified(0), 1),
        (classified(0, 1), classified(1, 0), 0),
        (classified(0), classified(1, spec=OTHERS), 1),
        (classified(0), classified(), 0),
        (described(1, 0), described(0.6, 0.8), 1),
        (described(1, 0), described(0, 1), 0),
        (described(1, 0), described(1, 0, 0), 0),
        (answer(), answer(), 1),
        (answer((HERE, 0.75, 0)), answer(), 0),
        (answer(NOTHING), answer(NOTHING), 0),  # boxes without area match nothing
        (answer((HERE, 0.5, 0)), answer(((0, 0, 10, 5), 0.5, 0)), 1),  # from half of the union on
        (answer((HERE, 0.5, 0)), answer(((0, 0, 10, 4.9), 0.5, 0)), 0),
    ],
)
def test_answers_agree_by_overlap_first_class_or_cosine(first: TaskResult, second: TaskResult, agreement: float) -> None:
    assert compare(first, second).agreement == agreement


_SIDES = st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 6), st.integers(1, 6))
_BOXES = st.lists(
    st.tuples(
        _SIDES.map(lambda side: (*side[:2], side[0] + side[2], side[1] + side[3])), st.floats(0, 1, width=16), st.integers(0, 1)
    ),
    max_size=8,
)


@given(_BOXES, _BOXES)
def test_each_box_counts_once_and_both_ways_agree(boxes: list[Box], others: list[Box]) -> None:
    found, reverse = compare(answer(*boxes), answer(*others)), compare(answer(*others), answer(*boxes))

    assert len(found.matches) + found.missing.total() == len(boxes)
    assert len(found.matches) + found.additional.total() == len(others)
    assert all(0.5 <= match.iou <= 1 for match in found.matches)
    assert compare(answer(*boxes), answer(*boxes)).agreement == 1
    assert sorted(match.iou for match in found.matches)[-1:] == sorted(match.iou for match in reverse.matches)[-1:]
