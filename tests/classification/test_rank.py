"""The best classes, in order."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.classification.rank import rank

PROBABILITIES = np.array([0.1, 0.4, 0.1, 0.3, 0.1], np.float32)


@pytest.mark.parametrize(
    ("top_k", "confidence", "expected"),
    [
        (1, 0.0, [1]),
        (2, 0.0, [1, 3]),
        (3, 0.0, [1, 3, 0]),
        (4, 0.0, [1, 3, 0, 2]),
        (5, 0.0, [1, 3, 0, 2, 4]),
        (1000, 0.0, [1, 3, 0, 2, 4]),
        (1000, 0.2, [1, 3]),
        (1, 0.2, [1]),
        (5, 0.5, []),
    ],
)
def test_the_best_classes_come_first(top_k: int, confidence: float, expected: list[int]) -> None:
    """At most as many as asked for, none below the minimum; of equals, the lower id comes first."""
    best = rank(PROBABILITIES, top_k=top_k, confidence=confidence)

    assert best.class_ids.tolist() == expected
    assert best.scores.tolist() == PROBABILITIES[expected].tolist()
    assert (best.class_ids.dtype, best.scores.dtype) == (np.dtype("i4"), np.dtype("f4"))


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=50), st.integers(1, 60), st.floats(0, 1))
def test_the_order_is_that_of_sorting_all(scores: list[float], top_k: int, confidence: float) -> None:
    ranked = sorted((-score, index) for index, score in enumerate(scores) if score >= np.float32(confidence))

    best = rank(np.array(scores, np.float32), top_k=top_k, confidence=confidence)

    assert best.class_ids.tolist() == [index for _, index in ranked[:top_k]]
