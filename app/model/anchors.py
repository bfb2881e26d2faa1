"""The anchor grid of detection heads with strides 8, 16 and 32, and the shapes of outputs with a row for each anchor."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

STRIDES = (8, 16, 32)
"""Pixels of the input per grid cell."""


def count_anchors(input_size: tuple[int, int]) -> int:
    """Return the number of anchors for an input of width x height pixels."""
    width, height = input_size
    return sum((width // stride) * (height // stride) for stride in STRIDES)


def possible_anchors(input_size: tuple[int, int]) -> tuple[int, int, int]:
    """Return the numbers of anchors that YOLO heads have: with `STRIDES`, and also with a stride of 64 (P6) or 4 (P2)."""
    width, height = input_size
    anchors = count_anchors(input_size)
    return anchors, anchors + (width // 64) * (height // 64), anchors + (width // 4) * (height // 4)


def anchor_grid(input_size: tuple[int, int]) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return the cell corners (anchors, 2), x y in cells in the order of a YOLOX head, and the strides (anchors, 1) in pixels."""
    width, height = input_size
    corners, strides = [], []
    for stride in STRIDES:
        y, x = np.indices((height // stride, width // stride), dtype=np.float32)
        corners.append(np.stack([x.ravel(), y.ravel()], axis=1))
        strides.append(np.full((x.size, 1), stride, np.float32))
    return np.concatenate(corners), np.concatenate(strides)


def is_transposed(shape: Sequence[int], size: tuple[int, int]) -> bool:
    """Return whether the output of the head `yolo` with this shape, without the batch, has the anchors first."""
    first, second = shape
    anchors = possible_anchors(size)
    return second not in (0, *anchors) and (first in anchors or first > second)


def rows_of_anchors(size: tuple[int, int]) -> frozenset[int]:
    """Return the numbers of rows that heads with a row for each anchor usually have."""
    anchors = possible_anchors(size)
    return frozenset((*anchors, *(3 * count for count in anchors)))
