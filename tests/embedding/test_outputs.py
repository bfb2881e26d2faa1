"""How alike two vectors are."""

import numpy as np
import pytest

from app.embedding.outputs import similarity


@pytest.mark.parametrize(("distance", "expected"), [(0, 1), (0.2, 0.8), (0.4, 0.6), (1, 0), (2, 0)])
def test_the_decision_of_the_model_is_at_point_six(distance: float, expected: float) -> None:
    """The second vector is turned so far that its end lies at this distance."""
    angle = 2 * np.arcsin(distance / 2)
    one, other = np.array([1, 0], np.float32), np.array([np.cos(angle), np.sin(angle)], np.float32)

    assert similarity(one, other, 0.4) == pytest.approx(expected, abs=1e-6)
