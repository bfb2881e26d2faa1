"""The parts of the reference detector that need no network."""

import numpy as np
import pytest

from tests.reference_detector import Box, MatchCounts, boxes, iou, matches, suppress

LEFT, RIGHT = (0.0, 0.0, 10.0, 10.0), (5.0, 0.0, 15.0, 10.0)


def test_iou_is_the_shared_part_of_the_union() -> None:
    assert iou(LEFT, LEFT) == 1
    assert iou(LEFT, RIGHT) == pytest.approx(1 / 3)
    assert iou(LEFT, (10.0, 0.0, 20.0, 10.0)) == 0


def test_suppression_keeps_the_best_of_overlapping_boxes_of_a_class() -> None:
    corners = np.array([LEFT, LEFT, LEFT, RIGHT, RIGHT])
    scores = np.array([0.8, 0.9, 0.7, 0.6, 0.1])

    assert suppress(corners, scores, np.array([0, 0, 1, 0, 0]), 0.5, 0.25) == [1, 2, 3]


def test_a_box_matches_one_other_at_most() -> None:
    one, other = Box(1, 0.9, LEFT), Box(1, 0.8, LEFT)

    assert matches([one], [one, other], 0.9) == 1
    assert matches([one], [Box(2, 0.9, LEFT)], 0.9) == 0
    assert matches([one], [Box(1, 0.9, RIGHT)], 0.9) == 0


def test_f1_counts_missing_and_surplus_boxes() -> None:
    tally = MatchCounts()
    tally.add([Box(1, 0.9, LEFT)], [Box(1, 0.9, LEFT)])
    assert tally.f1 == 1

    tally.add([Box(1, 0.9, RIGHT)], [])
    assert tally.f1 == pytest.approx(2 / 3)
    assert str(tally) == "F1 0.6667 on 2 images: 2 boxes expected, 1 served, 1 matched"


def test_boxes_are_read_from_an_answer() -> None:
    detection = {"class_id": 3, "confidence": 0.5, "x1": 1.0, "y1": 2.0, "x2": 3.0, "y2": 4.0}

    assert boxes({"detections": [detection]}) == [Box(3, 0.5, (1.0, 2.0, 3.0, 4.0))]
