"""Draw boxes with names and scores on an image."""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.imaging.label import Colour, Label, fit, readable_name, render

# Bright enough for dark images, and saturated enough for bright ones. Adjacent colours differ most.
_COLOURS = (
    "e6194b 1e78ff ffd700 be46e6 3cc84b ff821e 32e1f0 f53cc8 "  # hexadecimal red, green and blue
    "b9eb32 826eff 00a596 ff8caa c8823c 50aaff 6eebaa fa5f55"
)
_PALETTE: list[Colour] = [(red, green, blue) for red, green, blue in map(bytes.fromhex, _COLOURS.split())]
_EDGE: Colour = (0, 0, 0)
_MIN_TEXT_SIZE = 12
_MIN_LINE_WIDTH = 2
# Relative to the square root of the number of pixels.
_TEXT_SIZE = 0.022
_LINE_WIDTH = 0.0028
# A label may take half of the image's width or, for a short name, this multiple of its text size.
_MIN_LABEL_WIDTH = 12
# The sides of a box are at least this multiple of the line width; lines become thinner in smaller boxes.
_MIN_BOX_WIDTHS = 6
# Labels avoid boxes with less than this multiple of their area.
_SMALL_BOX_LABELS = 3
# To hide a part of another label is worse than to hide a part of a box: the label cannot be read any more.
_LABEL_WEIGHT = 3


class Marks(NamedTuple):
    """The n detections to draw, by descending score."""

    boxes: NDArray[np.float32]
    """(n, 4) x1 y1 x2 y2, pixels of the image."""
    scores: NDArray[np.float32]
    """(n,)."""
    class_ids: NDArray[np.int32]
    """(n,)."""
    names: Sequence[str]
    """(n,)."""


def draw(pixels: NDArray[np.uint8], marks: Marks) -> None:
    """Draw on UINT8 pixels (height, width, 3) RGB, in place: frames inside the boxes, then labels.

    Where they overlap, the detection with the higher score is on top.
    """
    height, width = pixels.shape[:2]
    scale = sqrt(height * width)
    line_width = max(_MIN_LINE_WIDTH, round(scale * _LINE_WIDTH))
    text_size = max(_MIN_TEXT_SIZE, round(scale * _TEXT_SIZE))
    max_width = min(width, max(width // 2, _MIN_LABEL_WIDTH * text_size))
    boxes = _to_pixels(marks.boxes, width, height)
    colours = [colour_of(class_id) for class_id in marks.class_ids.tolist()]
    for (left, top, right, bottom), colour in reversed(list(zip(boxes.tolist(), colours, strict=True))):
        _draw_frame(pixels[top:bottom, left:right], line_width, colour)
    labels = [
        fit(readable_name(name, class_id), f"{score:.2f}", text_size, max_width, height // 2)
        for name, class_id, score in zip(marks.names, marks.class_ids.tolist(), marks.scores.tolist(), strict=True)
    ]
    places = _place(labels, boxes, width, height)
    for label, (left, top, right, bottom), colour in reversed(list(zip(labels, places.tolist(), colours, strict=True))):
        if label is not None:
            pixels[top:bottom, left:right] = render(label, colour)


def colour_of(class_id: int) -> Colour:
    """Return the colour of a class."""
    return _PALETTE[class_id % len(_PALETTE)]


def _to_pixels(boxes: NDArray[np.float32], width: int, height: int) -> NDArray[np.int64]:
    """Return the pixels of the image that boxes (n, 4) x1 y1 x2 y2 touch, at least one each; the ends are exclusive."""
    size = np.array((width, height))
    starts = np.minimum(np.maximum(np.floor(boxes[:, :2]), 0), size - 1)
    ends = np.maximum(np.minimum(np.ceil(boxes[:, 2:]), size), starts + 1)
    return np.hstack((starts, ends)).astype(np.int64)


def _draw_frame(area: NDArray[np.uint8], line_width: int, colour: Colour) -> None:
    """Draw a frame along the inside of a box's area, and a thin dark one inside it, for contrast with bright pixels."""
    line = max(1, min(line_width, min(area.shape[:2]) // _MIN_BOX_WIDTHS))
    lines = [(line + max(1, line // 3), _EDGE), (line, colour)] if line > 1 else [(line, colour)]
    for width, line_colour in lines:
        area[:width] = area[-width:] = area[:, :width] = area[:, -width:] = line_colour


def _place(labels: Sequence[Label | None], boxes: NDArray[np.int64], width: int, height: int) -> NDArray[np.int64]:
    """Place each label at its box, inside the image, where it hides the least of labels with higher scores and of small boxes.

    Boxes, and places of labels, are (n, 4) in pixels, with exclusive ends.
    """
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    places = np.zeros((len(labels), 4), np.int64)
    for index, (label, box) in enumerate(zip(labels, boxes, strict=True)):
        if label is not None:
            small = boxes[areas < _SMALL_BOX_LABELS * label.width * label.height]
            candidates = _candidates(label, box, width, height)
            hidden = _LABEL_WEIGHT * _overlaps(candidates, places[:index]) + _overlaps(candidates, small)
            places[index] = candidates[np.argmin(hidden)]
    return places


def _candidates(label: Label, box: NDArray[np.int64], width: int, height: int) -> NDArray[np.int64]:
    """Return the possible rectangles (8, 4) of a label at its box, best first, moved into the image if necessary."""
    size = np.array((label.width, label.height))
    left, top, right, bottom = box.tolist()
    lefts, tops = (left, right - label.width), (top - label.height, top, bottom, bottom - label.height)
    corners = np.array([(x, y) for x in lefts for y in tops])
    corners = np.maximum(0, np.minimum(corners, (width, height) - size))
    return np.hstack((corners, corners + size))


def _overlaps(candidates: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many pixels of each candidate (m, 4) the others (n, 4) cover, summed over the others, as (m,)."""
    one, other = candidates[:, None], others[None]
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    areas: NDArray[np.int64] = np.maximum(sides, 0).prod(axis=2).sum(axis=1)
    return areas
