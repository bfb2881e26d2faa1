"""Oriented boxes."""

import numpy as np
import pytest

from app.detection.nms import Candidates
from app.obb.boxes import enclose, suppress, to_corners, to_rotations


def found_of(*boxes: tuple[float, ...]) -> Candidates:
    """Make candidates of centre x, centre y, width, height, angle, and class, by descending score."""
    table = np.array(boxes, np.float32)
    half = table[:, 2:4] / 2
    corners = np.concatenate([table[:, :2] - half, table[:, :2] + half], axis=1)
    scores = np.linspace(0.9, 0.5, len(boxes), dtype=np.float32)
    return Candidates(corners, scores, table[:, 5].astype(np.int32), table[:, 4:5])


@pytest.mark.parametrize(
    ("size_and_angle", "corners", "rotation"),
    [
        ((40, 20, 0), [[30, 40], [70, 40], [70, 60], [30, 60]], 0),
        ((20, 40, 0), [[60, 30], [60, 70], [40, 70], [40, 30]], np.pi / 2),
        ((40, 20, np.pi / 2), [[60, 30], [60, 70], [40, 70], [40, 30]], np.pi / 2),
        ((40, 20, np.pi), [[30, 40], [70, 40], [70, 60], [30, 60]], 0),
        ((40, 20, -np.pi / 2), [[60, 30], [60, 70], [40, 70], [40, 30]], np.pi / 2),
    ],
)
def test_corners_run_clockwise_from_a_long_edge(
    size_and_angle: tuple[float, ...], corners: list[list[float]], rotation: float
) -> None:
    """Clockwise on the screen, where y points down."""
    found = to_corners(found_of((50, 50, *size_and_angle, 0)))

    np.testing.assert_allclose(found, [corners], atol=1e-4)
    difference = abs(float(to_rotations(found)[0]) - rotation)
    assert min(difference, np.pi - difference) < 1e-6
    np.testing.assert_allclose(enclose(found)[0], [*np.min(corners, axis=0), *np.max(corners, axis=0)], atol=1e-4)


def test_boxes_fall_to_better_ones_even_if_these_fall_too() -> None:
    row = [(50 + 14 * index, 50.0, 40.0, 20.0, 0.0, 0.0) for index in range(3)]

    assert suppress(found_of(*row), np.zeros(3, np.int32), 0.5).tolist() == [0]
    assert suppress(found_of(row[0], row[2]), np.zeros(2, np.int32), 0.5).tolist() == [0, 1]


def test_crossing_boxes_are_two_objects() -> None:
    """Their upright boxes are the same."""
    cross = found_of((50, 50, 60, 6, np.pi / 4, 0), (50, 50, 60, 6, -np.pi / 4, 0))

    assert suppress(cross, cross.class_ids, 0.5).tolist() == [0, 1]


def test_classes_do_not_suppress_each_other() -> None:
    same = found_of((50, 50, 40, 20, 0.3, 0), (50, 50, 40, 20, 0.3, 1))

    assert suppress(same, same.class_ids, 0.5).tolist() == [0, 1]
    assert suppress(same, None, 0.5).tolist() == [0]


def test_boxes_without_an_area_and_huge_ones_are_compared() -> None:
    with np.errstate(over="ignore", invalid="ignore"):
        odd = found_of((5, 5, 0, 0, 0, 0), (5, 5, 0, 0, 0, 0), (0, 0, 3e38, 3e38, 1, 0), (9, 9, -4, 2, 0, 0))
        assert 0 in suppress(odd, odd.class_ids, 0.5)
