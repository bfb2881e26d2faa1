"""Find the clusters of an index."""

import numpy as np
from numpy.typing import NDArray

MAX_CLUSTERS = 1024
MAX_SAMPLES = 50_000
_ITERATIONS, _ACCURACY, _SEED, _SHORT = 10, 1e-3, 7, 1e-6


def find_centroids(vectors: NDArray[np.float32], number: int) -> NDArray[np.float32]:
    """Return the centres (number, dimensions) of clusters of unit vectors (n, dimensions), of length 1; not more than vectors.

    The same vectors have the same clusters. 50,000 vectors of 512 numbers and 1,024 clusters take a core 45 s.
    """
    import cv2  # noqa: PLC0415 - takes time to load

    cv2.setRNGSeed(_SEED)
    criteria = cv2.TERM_CRITERIA_EPS + cv2.TERM_CRITERIA_MAX_ITER, _ITERATIONS, _ACCURACY
    number = min(number, len(vectors))
    _, _, found = cv2.kmeans(vectors, number, None, criteria, 1, cv2.KMEANS_PP_CENTERS)  # type: ignore[call-overload]
    lengths = np.linalg.norm(found, axis=1, keepdims=True)
    # Opposite vectors have a centre without direction.
    return np.where(lengths < _SHORT, vectors[:1], found / np.maximum(lengths, _SHORT)).astype(np.float32)
