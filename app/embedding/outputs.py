"""Decode the output of an embedding model, and compare vectors."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.errors import InvalidModelOutput
from app.model.heads import EmbeddingHead
from app.model.outputs import expect_shape, take_outputs
from app.model.spec import ModelSpec


def decode_vector(spec: ModelSpec, outputs: Mapping[str, NDArray[Any]]) -> NDArray[np.float32]:
    """Decode the output tensor for one image to FP32 (dimensions,), not normalized; raises InvalidModelOutput, also for zeros."""
    (vector,) = take_outputs(spec, outputs)
    expect_shape(spec, vector, (spec.expect_head(EmbeddingHead).dimensions,))
    if not (np.isfinite(vector).all() and vector.any()):
        raise InvalidModelOutput(f"{spec.name} returned a vector that is zero, or not finite")
    return vector.astype(np.float32)


def to_unit(vector: NDArray[np.float32]) -> tuple[NDArray[np.float32], float]:
    """Return the vector of length 1 in the same direction, and the length."""
    length = float(np.linalg.norm(vector.astype(np.float64)))
    return (vector / length).astype(np.float32), length


def similarity(one: NDArray[np.float32], other: NDArray[np.float32], match_distance: float) -> float:
    """Return how alike two vectors of length 1 are: 1 if they are equal, 0.6 at the distance up to which they match, at least 0."""
    return max(0.0, 1.0 - 0.4 * float(np.linalg.norm(one.astype(np.float64) - other)) / match_distance)


def similarity_at(cosine: float, match_distance: float) -> float:
    """Return what `similarity` returns for two vectors whose cosine is this."""
    return max(0.0, 1.0 - 0.4 * math.sqrt(max(0.0, 2.0 - 2.0 * cosine)) / match_distance)


def cosine_at(similarity: float, match_distance: float) -> float:
    """Return the cosine from which two vectors are as similar as this, or more."""
    distance = (1.0 - similarity) * match_distance / 0.4
    return max(-1.0, 1.0 - distance**2 / 2.0) if similarity > 0 else -1.0
