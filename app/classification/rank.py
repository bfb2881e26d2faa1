"""Rank the classes of one image."""

import numpy as np
from numpy.typing import NDArray


def rank(probabilities: NDArray[np.float32], *, top_k: int, confidence: float) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Choose at most `top_k` classes by their probabilities (classes,); the lower id wins among equal ones.

    Returns:
        Ids (n,) and probabilities (n,), by descending probability.
    """
    least = confidence
    if top_k < len(probabilities):  # sort only the best, even if there are many classes
        least = max(least, np.partition(probabilities, -top_k)[-top_k])
    chosen = np.flatnonzero(probabilities >= least)
    order = chosen[np.argsort(-probabilities[chosen], kind="stable")][:top_k]
    return order.astype(np.int32), probabilities[order]
