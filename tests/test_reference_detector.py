"""The parts of the reference detector that need no network: they judge every measurement of accuracy."""

import numpy as np
import pytest

from tests.reference_detector import Box, MatchCounts, boxes, iou, matches, suppress

LEFT, RIGHT = (0.0, 0.0, 10.0, 10.0), (5.0, 0.0, 15.0, 10.0)
BOX = Box(1, 0.9, LEFT)


def test_iou_is_the_shared_part_of_the_union() -> None:
    assert [iou(LEFT, other) for other in (LEFT, RIGHT, (10.0, 0.0, 20.0, 10.0))] == pytest.approx([1, 1 / 3, 0])


def test_suppression_keeps_the_best_of_overlapping_boxes_of_a_class() -> None:
    corners, scores = np.array([LEFT, LEFT, LEFT, RIGHT, RIGHT]), np.array([0.8, 0.9, 0.7, 0.6, 0.1])
    assert suppress(corners, scores, np.array([0, 0, 1, 0, 0]), 0.5, 0.25) == [1, 2, 3]


@pytest.mark.parametrize(
    ("found", "count"),
    [([BOX, Box(1, 0.8, LEFT)], 1), ([Box(2, 0.9, LEFT)], 0), ([Box(1, 0.9, RIGHT)], 0)],
)
def test_box_matches_at_most_one_of_its_class_and_place(found: list[Box], count: int) -> None:
    assert matches([BOX], found, 0.9) == matches(found, [BOX], 0.9) == count


def test_f1_counts_missing_and_surplus_boxes() -> None:
    tally = MatchCounts()
    for expected, found, f1 in (([BOX], [BOX], 1), ([BOX], [], 2 / 3), ([], [BOX], 1 / 2)):
        tally.add(expected, found)
        assert tally.f1 == pytest.approx(f1)


def test_boxes_are_read_from_an_answer() -> None:
    detection = {"class_id": 3, "confidence": 0.5, "x1": 1.0, "y1": 2.0, "x2": 3.0, "y2": 4.0}
    assert boxes({"detections": [detection]}) == [Box(3, 0.5, (1.0, 2.0, 3.0, 4.0))]
