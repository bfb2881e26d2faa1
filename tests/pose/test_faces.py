"""The quality of faces."""

import numpy as np
import pytest

from app.pose.faces import rate_faces


def face(eyes: float, nose: float) -> list[list[float]]:
    """A face whose eyes are so many pixels apart, with the nose at this fraction between them."""
    return [[10, 20], [10 + eyes, 20], [10 + nose * eyes, 30], [10, 50], [10 + eyes, 50]]


@pytest.mark.parametrize(
    ("eyes", "nose", "quality"),
    [
        pytest.param(106, 0.5, 0.8, id="large, frontal"),
        pytest.param(26.5, 0.5, 0.4, id="half of the detail"),
        pytest.param(106, 0.25, 0.4, id="turned"),
        pytest.param(106, 1.3, 0.0, id="profile"),
        pytest.param(0, 0.5, 0.0, id="both eyes in one place"),
    ],
)
def test_quality_falls_with_detail_and_turn(eyes: float, nose: float, quality: float) -> None:
    points, scores = np.array([face(eyes, nose)], np.float32), np.array([0.8], np.float32)

    assert rate_faces(points, scores) == pytest.approx([quality], abs=1e-5)


def test_a_tilted_head_is_as_good() -> None:
    points = np.array([face(60, 0.4)], np.float32)
    tilted = points @ np.array([[0.8, 0.6], [-0.6, 0.8]], np.float32)
    scores = np.ones(1, np.float32)

    assert rate_faces(tilted, scores) == pytest.approx(rate_faces(points, scores), abs=1e-5)
    assert rate_faces(points[:0], scores[:0]).shape == (0,)
