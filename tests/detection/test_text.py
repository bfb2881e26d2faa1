"""Lines of text in the maps of a detector, and the characters in a line."""

import cv2
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from app.errors import DeadlinePassed
from app.imaging.transform import ImageTransform
from app.resilience.deadline import Deadline
from app.text.outputs import TextSteps, read_text
from app.text.regions import find_regions

SIZE = 256, 192
IMAGE = 180, 150
"""Width and height of the map, and of the image."""
RECTANGLES = st.tuples(
    st.tuples(st.integers(-20, 280), st.integers(-20, 220)),
    st.tuples(st.integers(1, 300), st.integers(1, 80)),
    st.floats(0, 180),
    st.integers(60, 255),
)


def draw_map(*lines: tuple[tuple[int, int], tuple[int, int], float, int]) -> NDArray[np.uint8]:
    """Draw lines: centre, width and height, angle in degrees, probability of 255."""
    found = np.zeros(SIZE[::-1], np.uint8)
    for centre, size, angle, probability in lines:
        cv2.fillPoly(found, [cv2.boxPoints((centre, size, angle)).astype(int)], probability)
    return found


def find(found: NDArray[np.uint8], confidence: float = 0.5) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    return find_regions(found, ImageTransform(0, 0, *SIZE, *IMAGE), confidence, Deadline.after(60))


@pytest.mark.parametrize(
    ("lines", "corners", "scores"),
    [
        ([((80, 40), (100, 12), 0, 250)], [[[15, 20], [98, 20], [98, 44], [15, 44]]], [0.9014]),
        ([((120, 90), (150, 14), 25, 230)], [[[34, 27], [146, 85], [134, 113], [22, 55]]], [0.7947]),
        ([((5, 100), (60, 20), 0, 255)], [[[0, 62], [33, 62], [33, 95], [0, 95]]], [0.9287]),
        ([((80, 40), (3, 2), 0, 255)], [[[54, 30], [58, 30], [58, 34], [54, 34]]], [0.6]),
        ([((80, 40), (100, 12), 0, 120)], [], []),
        (
            [((200, 30), (60, 10), 0, 255), ((60, 54), (80, 10), 0, 255)],
            [[[114, 14], [167, 14], [167, 34], [114, 34]], [[8, 32], [77, 32], [77, 53], [8, 53]]],
            [0.9019, 0.9055],
        ),
    ],
    ids=["level", "turned", "at the edge", "smallest", "faint", "two rows"],
)
def test_lines_are_those_of_rapidocr(
    lines: list[tuple[tuple[int, int], tuple[int, int], float, int]], corners: list[list[list[int]]], scores: list[float]
) -> None:
    """Recorded from its release 3.10.0, which returns the scores of several lines in another order than the lines."""
    found, certainties = find(draw_map(*lines))

    assert found.tolist() == corners
    np.testing.assert_allclose(certainties, scores, atol=1e-4)


@given(st.lists(RECTANGLES, max_size=12), st.floats(0, 1))
def test_lines_are_rectangles_in_the_image_that_do_not_cross_themselves(
    lines: list[tuple[tuple[int, int], tuple[int, int], float, int]], confidence: float
) -> None:
    corners, scores = find(draw_map(*lines), confidence)

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
        np.random.default_rng(0).integers(0, 256, (256, 256), np.uint8),
        np.kron(np.indices((64, 64)).sum(axis=0) % 2, np.full((8, 8), 255)).astype(np.uint8),
    ],
    ids=["noise", "checks"],
)
def test_map_of_nonsense_gives_a_bounded_number_of_lines_or_is_late(hostile: NDArray[np.uint8]) -> None:
    transform = ImageTransform(0, 0, 256, 256, 3000, 10)
    corners, scores = find_regions(hostile, transform, 0, Deadline.after(60))

    assert len(corners) == len(scores) <= 1000
    assert np.isfinite(corners).all()
    with pytest.raises(DeadlinePassed, match="no time for all lines"):
        find_regions(hostile, transform, 0, Deadline.after(-1))


@pytest.mark.parametrize(
    ("classes", "scores", "text", "score"),
    [
        ([0, 1, 1, 0, 1, 2, 0], [0.9, 0.8, 0.7, 0.9, 0.6, 0.5, 0.9], "aab", 0.63333),
        ([3, 4, 4, 1], [0.5, 0.25, 0.5, 1.0], "c a", 0.58333),
        ([0, 0], [0.9, 0.9], "", 0.0),
        ([], [], "", 0.0),
    ],
)
def test_text_and_score_are_those_of_rapidocr(classes: list[int], scores: list[float], text: str, score: float) -> None:
    """Recorded from CTCLabelDecode of its release 3.10.0, which cannot decode a line without steps."""
    steps = TextSteps(np.array(classes, np.int32), np.array(scores, np.float32))
    found, confidence = read_text(steps, ("", "a", "b", "c", " "))

    assert found == text
    assert confidence == pytest.approx(score, abs=1e-5)
