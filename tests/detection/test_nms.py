"""Raw heads to boxes, compared with a plain loop as in textbooks."""

import numpy as np
import pytest
from numpy.typing import NDArray

from app.detection.nms import MAX_CANDIDATES, MAX_DETECTIONS, MIN_SCORE, from_yolo, from_yolov5, from_yolox, suppress
from app.model.anchors import count_anchors

Array = NDArray[np.float32]


def head_of(boxes: object, scores: object) -> Array:
    """Stack boxes (n, 4) centre and size, and scores (n, classes), into a YOLO head."""
    return np.concatenate([np.asarray(boxes, np.float32), np.asarray(scores, np.float32)], axis=1).T


def detect(head: Array, iou: float, *, is_agnostic: bool = False) -> tuple[Array, Array, NDArray[np.int32]]:
    found = from_yolo(head)
    corners, scores, classes, _ = found
    kept = suppress(found, None if is_agnostic else classes, iou)
    return corners[kept], scores[kept], classes[kept]


def test_scores_at_the_floor_are_dropped() -> None:
    below, above = np.float32(MIN_SCORE), np.nextafter(np.float32(MIN_SCORE), np.float32(1))
    head = head_of([[50, 50, 10, 10], [150, 50, 10, 10]], [[below], [above]])

    np.testing.assert_array_equal(from_yolo(head)[0], [[145, 45, 155, 55]])
    np.testing.assert_array_equal(from_yolo(head, 0)[0], [[145, 45, 155, 55], [45, 45, 55, 55]])


def test_rows_of_a_decoded_head_are_in_pixels() -> None:
    head = np.array([[400, 300, 60, 80, 1, 0.1, 0.2], [100, 50, 20, 10, 0.5, 0.8, 0.1], [9, 9, 9, 9, 0, 1, 1]], np.float32)

    corners, scores, classes, _ = from_yolov5(head)

    np.testing.assert_array_equal(corners, [[90, 45, 110, 55], [370, 260, 430, 340]])
    assert scores.tolist() == pytest.approx([0.4, 0.2])
    assert classes.tolist() == [0, 1]


@pytest.mark.parametrize("head", [head_of([[50, 50, 10, 10]], [[0.01, 0.02]]), np.zeros((6, 0), np.float32)])
def test_head_without_objects_is_three_empty_arrays(head: Array) -> None:
    for corners, scores, classes in (from_yolo(head)[:3], detect(head, 0.7)):
        assert (corners.shape, scores.shape, classes.shape) == ((0, 4), (0,), (0,))


def test_best_boxes_are_kept_if_there_are_too_many() -> None:
    count = MAX_CANDIDATES + 200
    scores = np.random.default_rng(0).permutation(np.linspace(0.1, 0.9, count, dtype=np.float32))
    boxes = [[20 * i, 50, 10, 10] for i in range(count)]

    found = detect(head_of(boxes, scores[:, None]), 0.5)

    np.testing.assert_array_equal(found[1], np.sort(scores)[::-1][:MAX_DETECTIONS])
    assert len(found[0]) == len(found[2]) == MAX_DETECTIONS


def test_candidates_are_limited_before_suppression() -> None:
    boxes = [[50, 50, 10, 10]] * MAX_CANDIDATES + [[500, 500, 10, 10]]
    scores = [[0.9]] * MAX_CANDIDATES + [[0.8]]

    np.testing.assert_array_equal(detect(head_of(boxes, scores), 0.5)[0], [[45, 45, 55, 55]])
    assert len(detect(head_of(boxes[1:], scores[1:]), 0.5)[0]) == 2


def test_yolox_head_is_in_cells() -> None:
    head = np.zeros((count_anchors((64, 32)), 7), np.float32)
    head[9] = [0.5, 0.25, np.log(2), np.log(4), 0.5, 0.1, 0.8]
    head[41] = [0, 0, 0, 0, 1, 0.6, 0.2]

    corners, scores, classes, _ = from_yolox(head, (64, 32))

    np.testing.assert_allclose(corners, [[16, -16, 48, 16], [4, -6, 20, 26]], atol=1e-5)
    assert scores.tolist() == pytest.approx([0.6, 0.4])
    assert classes.tolist() == [0, 1]


def test_objectness_alone_is_not_a_detection() -> None:
    head = np.zeros((count_anchors((32, 32)), 6), np.float32)
    head[:, 4], head[:, 5] = 1, MIN_SCORE / 2

    assert from_yolox(head, (32, 32))[0].shape == (0, 4)
