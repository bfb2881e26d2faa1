"""Draw boxes with names and scores on an image."""

from collections.abc import Sequence
from math import ceil, floor, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.imaging.label import Colour, Label, fit, readable_name, render

# Far apart in hue or brightness, and none like skin, sky or foliage.
_PALETTE: tuple[Colour, ...] = (
    (230, 25, 75),
    (0, 130, 200),
    (255, 225, 25),
    (145, 30, 180),
    (60, 220, 75),
    (245, 130, 48),
    (70, 240, 240),
    (240, 50, 230),
    (0, 0, 200),
    (210, 245, 60),
    (0, 128, 128),
    (250, 190, 212),
    (128, 0, 0),
    (170, 255, 195),
    (170, 110, 40),
    (220, 190, 255),
    (0, 100, 0),
    (255, 215, 180),
    (0, 0, 128),
    (255, 250, 200),
)
_MIN_TEXT_SIZE = 12
_MIN_LINE_WIDTH = 2
# Relative to the side of a square that has as many pixels as the image.
_TEXT_SIZE = 0.022
_LINE_WIDTH = 0.0028
# A frame leaves at least two thirds of its box as they are.
_MIN_BOX_WIDTHS = 6


class Marks(NamedTuple):
    """What is drawn: n detections by descending score."""

    boxes: NDArray[np.float32]
    """(n, 4) x1 y1 x2 y2, pixels of the image."""
    scores: NDArray[np.float32]
    """(n,)."""
    class_ids: NDArray[np.int32]
    """(n,)."""
    names: Sequence[str]
    """Of each detection (n,)."""


class _Rectangle(NamedTuple):
    """From `left` and `top` to `right` and `bottom`, which lie outside it, pixels."""

    left: int
    top: int
    right: int
    bottom: int


def draw(pixels: NDArray[np.uint8], marks: Marks) -> None:
    """Draw frames and labels. Nothing is drawn outside the boxes but labels; where they meet, the better detection is on top.

    Args:
        pixels: UINT8 (height, width, 3) RGB, which is changed.
        marks: What to draw.
    """
    height, width = pixels.shape[:2]
    scale = sqrt(height * width)
    line_width = max(_MIN_LINE_WIDTH, round(scale * _LINE_WIDTH))
    text_size = max(_MIN_TEXT_SIZE, round(scale * _TEXT_SIZE))
    boxes = [_to_rectangle(box, width, height) for box in marks.boxes.tolist()]
    colours = [colour_of(class_id) for class_id in marks.class_ids.tolist()]
    for box, colour in reversed(list(zip(boxes, colours, strict=True))):
        _draw_frame(pixels, box, line_width, colour)
    labels = [
        fit(readable_name(name, class_id), f"{score:.2f}", text_size, width, height // 2)
        for name, class_id, score in zip(marks.names, marks.class_ids.tolist(), marks.scores.tolist(), strict=True)
    ]
    places = _place(labels, boxes, width, height)
    for label, place, colour in reversed(list(zip(labels, places, colours, strict=True))):
        if label is not None:
            pixels[place.top : place.bottom, place.left : place.right] = render(label, colour)


def colour_of(class_id: int) -> Colour:
    """Return the colour of a class, which is always the same."""
    return _PALETTE[class_id % len(_PALETTE)]


def _to_rectangle(box: Sequence[float], width: int, height: int) -> _Rectangle:
    """Return the pixels that a box touches, at least one of the image."""
    left, top = min(max(0, floor(box[0])), width - 1), min(max(0, floor(box[1])), height - 1)
    return _Rectangle(left, top, max(min(ceil(box[2]), width), left + 1), max(min(ceil(box[3]), height), top + 1))


def _draw_frame(pixels: NDArray[np.uint8], box: _Rectangle, line_width: int, colour: Colour) -> None:
    left, top, right, bottom = box
    line = max(1, min(line_width, min(right - left, bottom - top) // _MIN_BOX_WIDTHS))
    pixels[top : top + line, left:right] = colour
    pixels[bottom - line : bottom, left:right] = colour
    pixels[top:bottom, left : left + line] = colour
    pixels[top:bottom, right - line : right] = colour


def _place(labels: Sequence[Label | None], boxes: Sequence[_Rectangle], width: int, height: int) -> list[_Rectangle]:
    """Find a place at its box for each label, inside the image, where it covers as little as possible of better ones."""
    places = np.zeros((len(labels), 4), np.int64)
    for index, (label, box) in enumerate(zip(labels, boxes, strict=True)):
        if label is not None:
            lefts = box.left, box.right - label.width
            tops = box.top - label.height, box.top, box.bottom, box.bottom - label.height
            corners = np.array([(left, top) for left in lefts for top in tops])
            corners = np.maximum(0, np.minimum(corners, (width - label.width, height - label.height)))
            candidates = np.hstack((corners, corners + np.array((label.width, label.height))))
            places[index] = candidates[np.argmin(_overlaps(candidates, places[:index]))]
    return [_Rectangle(*place) for place in places.tolist()]


def _overlaps(candidates: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many pixels of each candidate (m, 4) others (n, 4) cover: (m,)."""
    one, other = candidates[:, None], others[None]
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    areas: NDArray[np.int64] = np.maximum(sides, 0).prod(axis=2).sum(axis=1)
    return areas
