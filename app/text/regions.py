"""Find the lines of text in the map of a text detector, in reading order."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.imaging.transform import ImageTransform


def find_regions(
    found: NDArray[Any], transform: ImageTransform, confidence: float
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the corners (n, 4, 2) of lines of text in pixels of the upright image, and their scores (n,)."""
    raise NotImplementedError
