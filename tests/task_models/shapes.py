"""Pictures of drawn shapes whose outlines, keypoints and rotated boxes are known."""

from dataclasses import dataclass

import cv2
import numpy as np

NAMES = ("oval", "box", "triangle")
KEYPOINTS = ("nose", "left", "right")
SIZE = 256
"""Width and height of the models' input, and of the pictures for training, in pixels."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One shape, in pixels of its picture."""

    kind: int
    """Index in `NAMES`."""
    outline: np.ndarray
    """Polygon, float [P, 2]."""
    corners: np.ndarray
    """Rotated box, float [4, 2]."""
    keypoints: np.ndarray
    """x, y and visibility (0 or 2) of each of `KEYPOINTS`, float [3, 3]."""


def draw(rng: np.random.Generator, width: int, height: int) -> tuple[np.ndarray, list[Shape]]:
    """Draw up to eight shapes on a dark background with noise; they do not overlap, and are clear of the edges.

    Returns:
        The picture, uint8 [height, width, 3] in BGR, and its shapes.
    """
    coarse = rng.integers(20, 90, (5, 5, 3)).astype(np.uint8)
    picture = cv2.resize(coarse, (width, height), interpolation=cv2.INTER_CUBIC).astype(np.float32)
    picture = np.clip(picture + rng.normal(0, 12, picture.shape), 0, 255).astype(np.uint8)
    shapes: list[Shape] = []
    circles: list[tuple[np.ndarray, float]] = []
    for _ in range(rng.integers(6, 20)):
        length = rng.uniform(0.14, 0.32) * max(width, height)
        breadth = length * rng.uniform(0.45, 0.75)
        radius = float(np.hypot(length, breadth)) / 2
        centre = rng.uniform((radius, radius), (width - radius, height - radius))
        if len(shapes) == 8 or any(np.linalg.norm(centre - other) < radius + reach for other, reach in circles):
            continue
        circles.append((centre, radius))
        shapes.append(_draw_shape(rng, picture, centre, length, breadth))
    return picture, shapes


def _draw_shape(rng: np.random.Generator, picture: np.ndarray, centre: np.ndarray, length: float, breadth: float) -> Shape:
    """Draw a shape in one colour, with a white dot at its nose and a black dot at each of its other visible keypoints."""
    kind = int(rng.integers(len(NAMES)))
    angle = rng.uniform(0, 2 * np.pi)
    across = np.array([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    corners = np.array([[-0.5, -0.5], [0.5, -0.5], [0.5, 0.5], [-0.5, 0.5]])
    turns = np.linspace(0, 2 * np.pi, 48, endpoint=False)
    outline = (np.stack([np.cos(turns), np.sin(turns)], 1) / 2, corners, np.array([[0.5, 0], [-0.5, 0.5], [-0.5, -0.5]]))[kind]
    # Inside every kind of shape.
    keypoints = np.array([[0.25, 0], [-0.25, -0.25], [-0.25, 0.25]])
    placed = [points * (length, breadth) @ across + centre for points in (outline, corners, keypoints)]
    _fill(picture, placed[0], rng.integers(120, 230, 3))
    visible = np.array([True, *(rng.random(2) > 0.15)])
    for number in np.flatnonzero(visible):
        dot = placed[2][number] + np.stack([np.cos(turns), np.sin(turns)], 1) * length * 0.08
        _fill(picture, dot, 0 if number else 255)
    return Shape(kind, placed[0], placed[1], np.column_stack([placed[2], visible * 2.0]) * visible[:, None])


def _fill(picture: np.ndarray, polygon: np.ndarray, colour: np.ndarray | int) -> None:
    """Fill a polygon whose points lie between pixels' centres."""
    cv2.fillPoly(
        picture, [np.round((polygon - 0.5) * 16).astype(np.int32)], np.broadcast_to(colour, 3).tolist(), cv2.LINE_AA, shift=4
    )
