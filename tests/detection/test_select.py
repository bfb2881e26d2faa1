"""Which candidates the caller wants."""

import numpy as np
import pytest

from app.detection.outputs import Candidates
from app.detection.select import select, to_class_ids
from app.errors import InvalidParameter

LABELS = ("person", "car", "traffic light")


def candidates(*scores: float, class_ids: list[int] | None = None) -> Candidates:
    """Make candidates whose box begins at their index."""
    boxes = np.arange(len(scores), dtype=np.float32)[:, None] + np.array([[0, 0, 2, 2]], np.float32)
    return Candidates(boxes, np.array(scores, np.float32), np.array(class_ids or [0] * len(scores), np.int32))


def chosen(
    found: Candidates, *, confidence: float = 0.1, class_ids: frozenset[int] | None = None, max_detections: int = 10
) -> list[int]:
    """Return the indices of the candidates that are selected."""
    kept = select(found, confidence=confidence, class_ids=class_ids, max_detections=max_detections)
    return [int(x) for x in kept.boxes[:, 0]]


@pytest.mark.parametrize("confidence", [0.0, 0.25, 0.3, 1.0])
def test_confidence_is_the_least_score(confidence: float) -> None:
    """A score equal to the threshold is kept, the next smaller float is not."""
    at = np.float32(confidence)
    below = np.nextafter(at, np.float32(-1))

    assert chosen(candidates(float(at), float(below)), confidence=confidence) == [0]


def test_the_best_come_first() -> None:
    """Candidates are ordered by descending score."""
    found = select(candidates(0.5, 0.9, 0.6, 0.7), confidence=0.1, class_ids=None, max_detections=10)

    assert found.boxes[:, 0].tolist() == [1, 3, 2, 0]
    np.testing.assert_array_equal(found.scores, np.array([0.9, 0.7, 0.6, 0.5], np.float32))


def test_equal_scores_keep_their_order() -> None:
    """Many candidates of two scores come out as two runs, each in the order of the model."""
    assert chosen(candidates(*[0.5, 0.9] * 100), max_detections=300) == [*range(1, 200, 2), *range(0, 200, 2)]


def test_the_limit_keeps_the_best() -> None:
    """Of more candidates than asked for, the best are kept."""
    assert chosen(candidates(0.5, 0.9, 0.7), max_detections=2) == [1, 2]


@pytest.mark.parametrize(
    "box",
    [(5, 0, 5, 9), (0, 5, 9, 5), (0, 0, 0, 0), (9, 0, 5, 9), (0, 9, 9, 5), (9, 9, 5, 5)],
    ids=["no width", "no height", "no size", "negative width", "negative height", "both negative"],
)
def test_a_box_without_an_area_is_dropped(box: tuple[int, int, int, int]) -> None:
    """It lies in the padding, or the model put its corners the wrong way round; it takes no place of another box."""
    found = candidates(0.5, 0.9, 0.7)
    found.boxes[1] = box

    assert chosen(found, max_detections=1) == [2]
    assert chosen(found, max_detections=3) == [2, 0]


def test_a_very_small_box_is_kept() -> None:
    """Any area counts."""
    found = candidates(0.5)
    found.boxes[0] = 1, 1, np.nextafter(np.float32(1), np.float32(2)), 2

    assert chosen(found) == [1]


def test_only_candidates_of_the_classes_are_kept() -> None:
    """The others are dropped before the limit is applied; boxes, scores and classes stay together."""
    given = candidates(0.9, 0.8, 0.7, 0.6, class_ids=[0, 1, 2, 1])
    found = select(given, confidence=0.1, class_ids=frozenset({1, 2}), max_detections=2)

    assert found.boxes[:, 0].tolist() == [1, 2]
    assert found.class_ids.tolist() == [1, 2]
    np.testing.assert_array_equal(found.scores, np.array([0.8, 0.7], np.float32))


def test_without_a_class_nothing_is_kept() -> None:
    """An empty set of classes is not the same as all classes."""
    assert chosen(candidates(0.9, 0.8), class_ids=frozenset(), max_detections=2) == []


def test_nothing_is_kept_of_nothing() -> None:
    """No candidates are arrays of the right shape."""
    found = select(candidates(), confidence=0.1, class_ids=frozenset({1}), max_detections=2)

    assert found.boxes.shape == (0, 4)
    assert found.scores.shape == found.class_ids.shape == (0,)


def test_without_restriction_all_classes_are_kept() -> None:
    """None stands for all of them."""
    assert to_class_ids(None, LABELS) is None
    assert chosen(candidates(0.9, 0.8, class_ids=[0, 7])) == [0, 1]


@pytest.mark.parametrize(
    ("names", "ids"),
    [
        (["person"], frozenset({0})),
        (["traffic light", "car"], frozenset({1, 2})),
        (["2"], frozenset({2})),
        (["0", "person"], frozenset({0})),
        (["02"], frozenset({2})),
        ([], frozenset()),
    ],
)
def test_classes_are_names_or_ids(names: list[str], ids: frozenset[int]) -> None:
    """A class may be given either way."""
    assert to_class_ids(names, LABELS) == ids


def test_a_name_takes_precedence_over_an_id() -> None:
    """A model whose labels are numbers is asked by label."""
    assert to_class_ids(["5"], ["7", "5"]) == frozenset({1})


@pytest.mark.parametrize("labels", [(), LABELS])
@pytest.mark.parametrize("name", ["Person", "", "-1", "1.0", "²", "٣", "1_0", "0x1", "+1", "9" * 5000])
def test_any_other_class_is_rejected(name: str, labels: tuple[str, ...]) -> None:
    """It is quoted in part."""
    with pytest.raises(InvalidParameter) as caught:
        to_class_ids(["0", name], labels)

    assert caught.value.detail == f"classes: {name[:64]!r} is not a class of this model"


def test_an_id_beyond_the_labels_is_rejected() -> None:
    """A model with labels has no more classes than labels."""
    assert to_class_ids(["2"], LABELS) == frozenset({2})

    with pytest.raises(InvalidParameter, match="classes: '3' is not a class of this model"):
        to_class_ids(["3"], LABELS)


def test_any_id_is_a_class_of_a_model_without_labels() -> None:
    """Where no labels are known, ids are not checked."""
    assert to_class_ids(["0", "79", "100000"], ()) == frozenset({0, 79, 100000})


def test_an_id_that_no_candidate_can_have_finds_nothing() -> None:
    """A number beyond all integers is compared without a failure."""
    assert chosen(candidates(0.9, class_ids=[1]), class_ids=frozenset({1, 10**30})) == [0]
    assert chosen(candidates(0.9, class_ids=[1]), class_ids=frozenset({10**30})) == []
