"""Vectors in clusters, as those of real pictures: the same on every machine. Also runs inside the embedded Triton.

Within a cluster, two vectors have a cosine of about .6, and all other pairs one of about 0.
"""

import numpy as np

CLUSTERS, DIMENSIONS = 1000, 512
_SPREAD = 0.8
_SEED = 4603

_CENTRES = np.random.default_rng(_SEED).standard_normal((CLUSTERS, DIMENSIONS)) / DIMENSIONS**0.5


def make_vector(number: int) -> np.ndarray:
    """Return vector of a number: FP32 (DIMENSIONS,) of length 1."""
    noise = np.random.default_rng(number).standard_normal(DIMENSIONS) / DIMENSIONS**0.5
    vector: np.ndarray = _CENTRES[number % CLUSTERS] + _SPREAD * noise
    unit: np.ndarray = (vector / np.linalg.norm(vector)).astype(np.float32)
    return unit
