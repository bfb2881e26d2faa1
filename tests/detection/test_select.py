"""Which candidates the caller wants."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from app.detection.nms import Candidates, suppress
from app.detection.select import Suppression, choose_best, select, to_class_ids, to_suppression
from app.errors import InvalidParameter
from app.model.heads import RAW_HEADS, DetectionHead, OutputFormat

LABELS = ("person", "car", "traffic light")


def candidates(*scores: float, class_ids: list[int] | None = None) -> Candidates:
    boxes = np.arange(len(scores), dtype=np.float32)[:, None] + np.array([[0, 0, 2, 2]], np.float32)
    return Candidates(boxes, np.array(scores, np.float32), np.array(class_ids or [0] * len(scores), np.int32))


def chosen(
    found: Candidates, *, confidence: float = 0.1, class_ids: frozenset[int] | None = None, max_detections: int = 10
) -> list[int]:
    kept = select(found, confidence=confidence, class_ids=class_ids)
    return [int(x) for x in kept.boxes[choose_best(kept.boxes, max_detections), 0]]


@pytest.mark.parametrize("confidence", [0.0, 0.3, 1.0])
def test_confidence_is_the_least_score_and_equal_scores_keep_their_order(confidence: float) -> None:
    at = np.float32(confidence)

    assert chosen(candidates(float(at), float(np.nextafter(at, np.float32(-1)))), confidence=confidence) == [0]
    assert chosen(candidates(*[0.5, 0.9] * 100), max_detections=300) == [*range(1, 200, 2), *range(0, 200, 2)]


@pytest.mark.parametrize("box", [(5, 0, 5, 9), (0, 9, 9, 5)])
def test_box_without_an_area_is_dropped(box: tuple[int, int, int, int]) -> None:
    """It lies in the padding, or the model put its corners the wrong way round; it takes no place of another box."""
    found = candidates(0.5, 0.9, 0.7)
    found.boxes[0] = 0, 0, np.nextafter(np.float32(0), np.float32(1)), 2
    found.boxes[1] = box

    assert chosen(found, max_detections=1) == [2]
    assert chosen(found, max_detections=3) == [2, 0]


def test_classes_are_names_or_ids() -> None:
    for names, labels, ids in (
        (None, LABELS, None),
        (["0", "person", "02"], LABELS, {0, 2}),
        ([], LABELS, set()),
        (["5"], ("7", "5"), {1}),
        (["car"], ("car", "bus", "car"), {0, 2}),
        (["0", "79", "100000"], (), {0, 79, 100000}),
    ):
        assert to_class_ids(names, labels) == ids


@pytest.mark.parametrize("name", ["Person", "", "-1", "²", "9" * 5000, "3"])
def test_any_other_class_is_rejected(name: str) -> None:
    with pytest.raises(InvalidParameter) as caught:
        to_class_ids(["0", name], LABELS)

    similar = "; did you mean person?" if name == "Person" else ""
    assert caught.value.detail == f"classes: {name[:64]!r} is not a class of this model{similar}"
    assert to_class_ids(["0", name], LABELS, drops_unknown=True) == frozenset({0})
    assert chosen(candidates(0.9, class_ids=[1]), class_ids=frozenset({1, 10**30})) == [0]  # no integer of the array


def test_many_classes_are_not_each_compared_with_all_labels() -> None:
    """This runs on the event loop, for each image of a batch."""
    compared = 0

    class Name(str):
        __slots__ = ()
        __hash__ = str.__hash__

        def __eq__(self, other: object) -> bool:
            nonlocal compared
            compared += 1
            return str.__eq__(self, other)

    labels = [Name(f"label {number}") for number in range(100)]
    assert to_class_ids([Name(f"other {number}") for number in range(100)], labels, drops_unknown=True) == frozenset()
    assert compared < 1000


@st.composite
def crowds(draw: st.DrawFn) -> Candidates:
    """Draw up to a dozen candidates on a few pixels, so that many overlap; scores differ, so that their order is certain."""
    count = draw(st.integers(0, 12))
    corners = draw(arrays.arrays(np.float32, (count, 4), elements=st.integers(0, 6).map(float)))
    boxes = np.concatenate([np.minimum(corners[:, :2], corners[:, 2:]), np.maximum(corners[:, :2], corners[:, 2:])], axis=1)
    scores = np.array(draw(st.permutations(range(count))), np.float32) / np.float32(12)
    return Candidates(boxes, scores, draw(arrays.arrays(np.int32, count, elements=st.integers(0, 2))))


suppressions = st.builds(Suppression, st.sampled_from([0.0, 0.1, 0.3, 0.45, 0.7, 1.0]), st.booleans(), st.just(suppress))


def overlap(a: list[float], b: list[float]) -> float:
    """Divide the intersection of two boxes by their union; nothing has none in common with nothing."""
    common = max(0, min(a[2], b[2]) - max(a[0], b[0])) * max(0, min(a[3], b[3]) - max(a[1], b[1]))
    union = (a[2] - a[0]) * (a[3] - a[1]) + (b[2] - b[0]) * (b[3] - b[1]) - common
    return common / union if union else 0.0


def plainly(
    found: Candidates, confidence: float, class_ids: frozenset[int] | None, suppression: Suppression
) -> list[tuple[float, int, list[float]]]:
    """Go through the wanted ones, best first; keep each that overlaps none kept before."""
    kept: list[tuple[float, int, list[float]]] = []
    for score, class_, box in sorted(
        zip(found.scores.tolist(), found.class_ids.tolist(), found.boxes.tolist(), strict=True), reverse=True
    ):
        rivals = [other for _, other_class, other in kept if suppression.is_agnostic or other_class == class_]
        is_wanted = score >= confidence and (class_ids is None or class_ in class_ids)
        if is_wanted and all(overlap(box, other) <= suppression.iou for other in rivals):
            kept.append((score, class_, box))
    return kept


@given(crowds(), st.sampled_from([0.0, 0.25, 0.5]), st.none() | st.frozensets(st.integers(0, 2)), suppressions)
def test_suppression_is_that_of_a_plain_loop(
    found: Candidates, confidence: float, class_ids: frozenset[int] | None, suppression: Suppression
) -> None:
    kept = select(found, confidence=confidence, class_ids=class_ids, suppression=suppression)

    expected = plainly(found, confidence, class_ids, suppression)
    assert [(s, c, b) for b, s, c in zip(*(part.tolist() for part in kept[:3]), strict=True)] == expected


@pytest.mark.parametrize(
    ("output_format", "iou", "max_iou", "is_agnostic", "expected"),
    [
        *((output_format, None, 1.0, False, 0.45 if output_format in RAW_HEADS else None) for output_format in OutputFormat),
        (OutputFormat.SIX_COLUMNS, 0.3, 0.5, False, 0.3),
        (OutputFormat.RTDETR, None, 0.5, True, 0.45),
        (OutputFormat.END_TO_END, 0.5, 0.5, False, None),  # the model leaves no more
        (OutputFormat.END_TO_END, 0.5, 0.5, True, 0.5),
        (OutputFormat.YOLO_HEAD, 1.0, 1.0, False, 1.0),
    ],
)
def test_duplicates_are_suppressed_where_the_model_does_not(
    output_format: OutputFormat, iou: float | None, max_iou: float, expected: float | None, *, is_agnostic: bool
) -> None:
    """More than the model leaves cannot be asked for: the suppressed boxes are gone."""
    head = DetectionHead(output_format=output_format, has_normalized_boxes=False, iou=0.45, max_iou=max_iou)

    suppression = None if expected is None else Suppression(expected, is_agnostic, suppress)
    assert to_suppression(iou, head, is_agnostic=is_agnostic) == suppression
    if max_iou < 1:
        with pytest.raises(InvalidParameter, match=rf"^iou: the model itself drops boxes that overlap by more than {max_iou}"):
            to_suppression(max_iou + 0.01, head, is_agnostic=is_agnostic)
