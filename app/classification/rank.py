"""Rank the classes of one image."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Ranking(NamedTuple):
    """The best classes of one image, by descending probability."""

    class_ids: NDArray[np.int32]
    """Shape (n,)."""
    scores: NDArray[np.float32]
    """Shape (n,), 0 to 1."""


def rank(probabilities: NDArray[np.float32], *, top_k: int, confidence: float) -> Ranking:
    """Choose at most `top_k` classes by their probabilities (classes,); the lower id wins among equal ones."""
    least = confidence
    if top_k < len(probabilities):  # sort only the best, even if there are many classes
        least = max(least, np.partition(probabilities, -top_k)[-top_k])
    chosen = np.flatnonzero(probabilities >= least)
    order = chosen[np.argsort(-probabilities[chosen], kind="stable")][:top_k]
    return Ranking(order.astype(np.int32), probabilities[order])
