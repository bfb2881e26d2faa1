"""Decode a classifier's output tensor to probabilities, reject invalid outputs, and rank the classes."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.errors import InvalidModelOutput
from app.model.heads import ClassificationHead
from app.model.outputs import MAX_PROBABILITY, expect_shape, take_outputs
from app.model.spec import ModelSpec


def decode_outputs(spec: ModelSpec, outputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Decode the output tensor for one image to FP32 (classes,), 0 to 1: the softmax of logits, or the model's probabilities."""
    head = spec.expect_head(ClassificationHead)
    (scores,) = take_outputs(spec, outputs)
    expect_shape(spec, scores, (head.classes if head.classes > 0 else None,))
    if not scores.size:
        raise InvalidModelOutput(f"{spec.name} returned no scores")
    if not np.isfinite(scores).all():
        raise InvalidModelOutput(f"{spec.name} returned scores that are not finite")
    if head.scores == "logits":
        return softmax(scores)
    if not (scores.min() >= 0 and scores.max() <= MAX_PROBABILITY):
        raise InvalidModelOutput(f"{spec.name} returned scores outside 0 to 1, though its config says `scores: probabilities`")
    return np.minimum(scores.astype(np.float32), 1)


def softmax(logits: NDArray[Any]) -> NDArray[np.float32]:
    """Return the probabilities of logits, both of shape (..., classes)."""
    wide = logits.astype(np.float64)  # differences of finite FP32 values cannot overflow
    powers = np.exp(wide - wide.max(axis=-1, keepdims=True))
    shares: NDArray[np.float64] = powers / powers.sum(axis=-1, keepdims=True)
    return shares.astype(np.float32)


def rank(probabilities: NDArray[np.float32], *, top_k: int, confidence: float) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Return ids (n,) and probabilities (n,), descending, of at most `top_k` classes; the lower id wins among equal ones."""
    least = confidence
    if top_k < len(probabilities):  # sort only the best, even if there are many classes
        least = max(least, np.partition(probabilities, -top_k)[-top_k])
    chosen = np.flatnonzero(probabilities >= least)
    order = chosen[np.argsort(-probabilities[chosen], kind="stable")][:top_k]
    return order.astype(np.int32), probabilities[order]
