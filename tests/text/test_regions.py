"""Lines of text in the maps of a detector."""

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.errors import DeadlinePassed
from app.imaging.transform import ImageTransform
from app.resilience.deadline import Deadline
from app.text.regions import find_regions

SIZE = 256, 192
IMAGE = 180, 150
"""Width and height of the map, and of the image."""
TRANSFORM = ImageTransform(0, 0, *SIZE, *IMAGE)
RECTANGLES = st.tuples(
    st.tuples(st.integers(-20, 280), st.integers(-20, 220)),
    st.tuples(st.integers(1, 300), st.integers(1, 80)),
    st.floats(0, 180),
    st.integers(60, 255),
)


def draw(*lines: tuple[tuple[int, int], tuple[int, int], float, int]) -> NDArray[np.uint8]:
    """Draw lines: centre, width and height, angle in degrees, probability of 255."""
    found = np.zeros(SIZE[::-1], np.uint8)
    for centre, size, angle, probability in lines:
        cv2.fillPoly(found, [cv2.boxPoints((centre, size, angle)).astype(int)], probability)
    return found


def find(found: NDArray[np.uint8], confidence: float = 0.5) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return find_regions(found, TRANSFORM, confidence, Deadline.after(60))


@pytest.mark.parametrize(
    ("lines", "corners", "scores"),
    [
        ([((80, 40), (100, 12), 0, 250)], [[[15, 20], [98, 20], [98, 44], [15, 44]]], [0.9014]),
        ([((120, 90), (150, 14), 25, 230)], [[[34, 27], [146, 85], [134, 113], [22, 55]]], [0.7947]),
        ([((60, 90), (12, 110), 0, 200)], [[[32, 20], [53, 20], [53, 121], [32, 121]]], [0.7218]),
        ([((5, 100), (60, 20), 0, 255)], [[[0, 62], [33, 62], [33, 95], [0, 95]]], [0.9287]),
        ([((80, 40), (3, 2), 0, 255)], [[[54, 30], [58, 30], [58, 34], [54, 34]]], [0.6]),
        ([((80, 40), (100, 12), 0, 120)], [], []),
        (
            [((200, 50), (60, 10), 0, 255), ((60, 54), (80, 10), 0, 255)],
            [[[8, 32], [77, 32], [77, 53], [8, 53]], [[114, 29], [167, 29], [167, 48], [114, 48]]],
            [0.9055, 0.9019],
        ),
        (
            [((200, 30), (60, 10), 0, 255), ((60, 54), (80, 10), 0, 255)],
            [[[114, 14], [167, 14], [167, 34], [114, 34]], [[8, 32], [77, 32], [77, 53], [8, 53]]],
            [0.9019, 0.9055],
        ),
    ],
    ids=["level", "turned", "upright", "at the edge", "smallest", "faint", "a row", "two rows"],
)
def test_lines_are_those_of_rapidocr(
    lines: list[tuple[tuple[int, int], tuple[int, int], float, int]], corners: list[list[list[int]]], scores: list[float]
) -> None:
    """Recorded from its release 3.10.0, which returns the scores of several lines in another order than the lines."""
    found, certainties = find(draw(*lines))

    assert found.tolist() == corners
    np.testing.assert_allclose(certainties, scores, atol=1e-4)


@given(st.lists(RECTANGLES, max_size=12), st.floats(0, 1))
def test_lines_are_rectangles_in_the_image_that_do_not_cross_themselves(
    lines: list[tuple[tuple[int, int], tuple[int, int], float, int]], confidence: float
) -> None:
    corners, scores = find(draw(*lines), confidence)

    assert corners.dtype == scores.dtype == np.float32
    assert corners.shape == (len(scores), 4, 2)
    assert (scores >= np.float32(confidence)).all()
    assert ((corners >= 0) & (corners < IMAGE)).all()
    for line in corners:
        assert cv2.isContourConvex(line.astype(np.int32))
        assert cv2.contourArea(line, oriented=True) > 0  # clockwise on the screen


@pytest.mark.parametrize(
    "hostile",
    [
        np.full((256, 256), 255, np.uint8),
        np.random.default_rng(0).integers(0, 256, (256, 256), np.uint8),
        np.kron(np.indices((64, 64)).sum(axis=0) % 2, np.full((8, 8), 255)).astype(np.uint8),
        np.where(np.hypot(*(np.indices((256, 256)) - 128)) % 6 < 3, 255, 0).astype(np.uint8),
    ],
    ids=["all text", "noise", "checks", "rings"],
)
def test_a_map_of_nonsense_gives_a_bounded_number_of_lines(hostile: NDArray[np.uint8]) -> None:
    corners, scores = find_regions(hostile, ImageTransform(0, 0, 256, 256, 3000, 10), 0, Deadline.after(60))

    assert len(corners) == len(scores) <= 1000
    assert np.isfinite(corners).all()


def test_lines_that_there_is_no_time_for_are_an_error() -> None:
    found = draw(((80, 40), (100, 12), 0, 250))

    with pytest.raises(DeadlinePassed, match="no time for all lines"):
        find_regions(found, TRANSFORM, 0.5, Deadline.after(-1))
