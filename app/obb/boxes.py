"""Oriented boxes: their corners, and the suppression of duplicates by probabilistic intersection over union."""

import numpy as np
from numpy.typing import NDArray

from app.detection.nms import MAX_DETECTIONS, Candidates

# Keeps divisors and logarithms away from zero.
_TINY = 1e-7
_MAX_DISTANCE = 100.0
# In which the overlaps of boxes are computed: those of a thousand boxes at once would take 70 MB.
_PARTS = 16
_SIDES = np.array([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]], np.float32)


def to_corners(found: Candidates) -> NDArray[np.float32]:
    """Return the corners (n, 4, 2) x y of boxes that are turned about their centres by their feature, an angle in radians.

    They run clockwise on the screen. The edge from the first to the second is at least as long as the next one.
    """
    centres, sizes, angles = _split(found)
    is_high = sizes[:, 0] < sizes[:, 1]
    sizes = np.where(is_high[:, None], sizes[:, ::-1], sizes)
    angles = (angles + np.where(is_high, np.pi / 2, 0)) % np.pi
    cos, sin = np.cos(angles), np.sin(angles)
    turn = np.stack([np.stack([cos, sin], axis=1), np.stack([-sin, cos], axis=1)], axis=1)
    corners: NDArray[np.float32] = (centres[:, None] + (_SIDES * sizes[:, None]) @ turn).astype(np.float32)
    return corners


def to_rotations(corners: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the angles (n,), from 0 to pi, of the first edges of boxes with these corners (n, 4, 2)."""
    edges = corners[:, 1] - corners[:, 0]
    angles: NDArray[np.float32] = np.arctan2(edges[:, 1], edges[:, 0]) % np.float32(np.pi)
    return angles


def enclose(corners: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the upright boxes (n, 4) x1 y1 x2 y2 around corners (n, 4, 2)."""
    return np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)


def suppress(found: Candidates, classes: NDArray[np.int32] | None, iou: float) -> NDArray[np.intp]:
    """Choose the boxes that overlap with no better box, itself suppressed or not, by a probabilistic `iou` or more.

    This is the fast NMS of Ultralytics' own post-processing; arguments and return value are as for `nms.suppress`.
    """
    parts = np.array_split(np.arange(len(found.scores)), _PARTS)
    overlaps = np.concatenate([_overlaps(found, part) >= iou for part in parts])
    if classes is not None:
        overlaps &= classes[:, None] == classes
    return np.flatnonzero(~np.triu(overlaps, 1).any(axis=0))[:MAX_DETECTIONS]


def _split(found: Candidates) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return centres (n, 2), sizes (n, 2) and angles (n,)."""
    assert found.features is not None  # noqa: S101 - the head has one feature
    starts, ends = np.split(found.boxes.astype(np.float64), 2, axis=1)
    return (starts + ends) / 2, ends - starts, found.features[:, 0].astype(np.float64)


def _overlaps(found: Candidates, part: NDArray[np.intp]) -> NDArray[np.float64]:
    """Return the probabilistic intersection over union (m, n) of boxes with these indices (m,) and all boxes.

    It is 1 - the Hellinger distance of normal distributions: https://arxiv.org/abs/2106.06072.
    """
    centres, sizes, angles = _split(found)
    variances = sizes**2 / 12
    cos, sin = np.cos(angles), np.sin(angles)
    a = variances[:, 0] * cos**2 + variances[:, 1] * sin**2
    b = variances[:, 0] * sin**2 + variances[:, 1] * cos**2
    c = (variances[:, 0] - variances[:, 1]) * cos * sin
    x, y = centres[part, :1] - centres[:, 0], centres[part, 1:] - centres[:, 1]
    a_sum, b_sum, c_sum = a[part, None] + a, b[part, None] + b, c[part, None] + c
    determinant = a_sum * b_sum - c_sum**2
    distance = (a_sum * y**2 + b_sum * x**2 - 2 * c_sum * x * y) / (determinant + _TINY) / 4
    own = np.maximum(a * b - c**2, 0)
    distance += np.log(determinant / (4 * np.sqrt(own[part, None] * own) + _TINY) + _TINY) / 2
    overlaps: NDArray[np.float64] = 1 - np.sqrt(1 - np.exp(-np.clip(distance, _TINY, _MAX_DISTANCE)) + _TINY)
    return overlaps
