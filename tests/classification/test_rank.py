"""The best classes, in order."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from app.classification.outputs import rank


@given(st.lists(st.floats(0, 1, width=32), min_size=1, max_size=50), st.integers(1, 60), st.floats(0, 1))
def test_the_order_is_that_of_sorting_all(scores: list[float], top_k: int, confidence: float) -> None:
    ranked = sorted((-score, index) for index, score in enumerate(scores) if score >= np.float32(confidence))

    class_ids, best = rank(np.array(scores, np.float32), top_k=top_k, confidence=confidence)

    assert class_ids.tolist() == [index for _, index in ranked[:top_k]]
    assert best.tolist() == [-score for score, _ in ranked[:top_k]]
    assert (class_ids.dtype, best.dtype) == (np.dtype("i4"), np.dtype("f4"))
