"""Draw boxes, masks and keypoints with names and scores on an image."""

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

import cv2
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
# Along these weights of x and y, the first vertex is near the top left.
_DOWNWARDS = np.array([1, 2], np.float32)
_MASK_OPACITY = 0.45
_MIN_KEYPOINT_CONFIDENCE = 0.5
# Radius of a keypoint relative to the line width.
_DOT_RADIUS = 2
# OpenCV draws between pixels in coordinates with so many fractional bits. Those of a pixel's centre are whole numbers.
_FRACTIONAL_BITS = 4
_FRACTIONS = 1 << _FRACTIONAL_BITS
_FAR = 1 << 30


class Marks(NamedTuple):
    """The n detections to draw, by descending score, each with a class id and a name."""

    boxes: NDArray[np.float32]
    """(n, 4) x1 y1 x2 y2, pixels of the image."""
    scores: NDArray[np.float32]
    """(n,), as are ids and names."""
    class_ids: NDArray[np.int32]
    names: Sequence[str]
    masks: Sequence[Sequence[NDArray[np.float32]]] | None = None
    """(n,) polygons of each mask: (vertices, 2) x y, pixels of the image."""
    keypoints: NDArray[np.float32] | None = None
    """(n, keypoints, 2 or 3) x y, pixels of the image, and the confidence."""
    corners: NDArray[np.float32] | None = None
    """(n, 4, 2) x y, pixels of the image, of oriented boxes; `boxes` enclose them."""


def draw(pixels: NDArray[np.uint8], marks: Marks) -> None:
    """Draw on UINT8 pixels (height, width, 3) RGB, in place: masks, then frames inside the boxes and keypoints, then labels.

    Where they overlap, the detection with the higher score is on top. Masks need a copy of the part of the image that has any.
    """
    height, width = pixels.shape[:2]
    scale = sqrt(height * width)
    line_width = max(_MIN_LINE_WIDTH, round(scale * _LINE_WIDTH))
    text_size = max(_MIN_TEXT_SIZE, round(scale * _TEXT_SIZE))
    max_width = min(width, max(width // 2, _MIN_LABEL_WIDTH * text_size))
    boxes = _to_pixels(marks.boxes, width, height)
    colours = [colour_of(class_id) for class_id in marks.class_ids.tolist()]
    if marks.masks:
        _fill_masks(pixels, marks.masks, boxes, colours)
    for index, (box, colour) in reversed(list(enumerate(zip(boxes, colours, strict=True)))):
        left, top, right, bottom = box.tolist()
        line = max(1, min(line_width, min(right - left, bottom - top) // _MIN_BOX_WIDTHS))
        if marks.masks is not None:
            _draw_polygons(pixels, marks.masks[index], line, colour)
        elif marks.corners is not None:
            _draw_polygons(pixels, [marks.corners[index]], line, colour)
        else:
            _draw_frame(pixels[top:bottom, left:right], line, colour)
        if marks.keypoints is not None:
            _draw_dots(pixels, marks.keypoints[index], line)
    labels = [
        fit(readable_name(name, class_id), f"{score:.2f}", text_size, max_width, height // 2)
        for name, class_id, score in zip(marks.names, marks.class_ids.tolist(), marks.scores.tolist(), strict=True)
    ]
    places = _place(labels, _to_pixels(_to_anchors(marks), width, height), boxes, width, height)
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


def _fill_masks(
    pixels: NDArray[np.uint8], masks: Sequence[Sequence[NDArray[np.float32]]], boxes: NDArray[np.int64], colours: Sequence[Colour]
) -> None:
    """Fill masks with a transparent colour; where they overlap, with that of the higher score alone."""
    (left, top), (right, bottom) = boxes[:, :2].min(axis=0), boxes[:, 2:].max(axis=0)
    region = pixels[top:bottom, left:right]
    filled = region.copy()
    for parts, colour in reversed(list(zip(masks, colours, strict=True))):
        polygons = [_to_fixed(part - (left, top)) for part in parts]
        cv2.fillPoly(filled, polygons, colour, shift=_FRACTIONAL_BITS)
    cv2.addWeighted(filled, _MASK_OPACITY, region, 1 - _MASK_OPACITY, 0, dst=region)


def _draw_polygons(pixels: NDArray[np.uint8], parts: Sequence[NDArray[np.float32]], line: int, colour: Colour) -> None:
    """Draw lines along the sides of polygons, and darker ones around them."""
    polygons = [_to_fixed(part) for part in parts]
    for width, line_colour in _lines(line, colour, edges=2):
        cv2.polylines(pixels, polygons, True, line_colour, width, cv2.LINE_AA, _FRACTIONAL_BITS)  # noqa: FBT003 - OpenCV's


def _draw_dots(pixels: NDArray[np.uint8], keypoints: NDArray[np.float32], line: int) -> None:
    """Draw the keypoints (keypoints, 2 or 3) of an object, without those of low confidence; each has a colour of its own."""
    radius = max(2, line * _DOT_RADIUS)
    for index, (centre, confidence) in enumerate(zip(_to_fixed(keypoints[:, :2]).tolist(), keypoints[:, 2:], strict=True)):
        if (confidence >= _MIN_KEYPOINT_CONFIDENCE).all():
            for size, colour in _lines(radius, colour_of(index), edges=1):
                cv2.circle(pixels, centre, size * _FRACTIONS, colour, cv2.FILLED, cv2.LINE_AA, _FRACTIONAL_BITS)


def _to_fixed(points: NDArray[np.float32]) -> NDArray[np.int32]:
    """Convert points (n, 2) x y from pixels of the image to OpenCV's coordinates."""
    fixed: NDArray[np.int32] = np.rint(np.clip((points - 0.5) * _FRACTIONS, -_FAR, _FAR)).astype(np.int32)
    return fixed


def _draw_frame(area: NDArray[np.uint8], line: int, colour: Colour) -> None:
    """Draw a frame along the inside of a box's area, and a thin dark one inside it."""
    for width, line_colour in _lines(line, colour, edges=1):
        area[:width] = area[-width:] = area[:, :width] = area[:, -width:] = line_colour


def _lines(line: int, colour: Colour, *, edges: int) -> list[tuple[int, Colour]]:
    """Return widths and colours of a line, in the order of drawing; a dark one shows at its edges, against bright pixels."""
    return [(line + edges * max(1, line // 3), _EDGE), (line, colour)] if line > 1 else [(line, colour)]


def _to_anchors(marks: Marks) -> NDArray[np.float32]:
    """Return the boxes (n, 4) beside which labels are: for masks and oriented boxes, a vertex near the top left, without area."""
    if marks.masks is not None:
        pairs = zip(marks.boxes, marks.masks, strict=True)
        outlines = [np.concatenate(parts) if parts else box[None, :2] for box, parts in pairs]
    elif marks.corners is not None:
        outlines = [*marks.corners]
    else:
        return marks.boxes
    points = [outline[(outline @ _DOWNWARDS).argmin()] for outline in outlines]
    return np.array(points, np.float32).reshape(-1, 2)[:, [0, 1, 0, 1]]


def _place(
    labels: Sequence[Label | None], anchors: NDArray[np.int64], boxes: NDArray[np.int64], width: int, height: int
) -> NDArray[np.int64]:
    # Anchors, boxes and places are (n, 4) in pixels, with exclusive ends. A label hides as little as possible of labels with higher
    # scores and of small boxes.
    areas = (boxes[:, 2:] - boxes[:, :2]).prod(axis=1)
    places = np.zeros((len(labels), 4), np.int64)
    for index, (label, anchor) in enumerate(zip(labels, anchors, strict=True)):
        if label is not None:
            size = np.array((label.width, label.height))
            small = boxes[areas < _SMALL_BOX_LABELS * size.prod()]
            left, top, right, bottom = anchor.tolist()
            lefts, tops = (left, right - label.width), (top - label.height, top, bottom, bottom - label.height)
            corners = np.array([(x, y) for x in lefts for y in tops])  # best first
            corners = np.maximum(0, np.minimum(corners, (width, height) - size))
            candidates = np.hstack((corners, corners + size))
            hidden = _LABEL_WEIGHT * _overlaps(candidates, places[:index]) + _overlaps(candidates, small)
            places[index] = candidates[np.argmin(hidden)]
    return places


def _overlaps(candidates: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return how many pixels of each candidate (m, 4) the others (n, 4) cover, summed over the others, as (m,)."""
    one, other = candidates[:, None], others[None]
    sides = np.minimum(one[..., 2:], other[..., 2:]) - np.maximum(one[..., :2], other[..., :2])
    areas: NDArray[np.int64] = np.maximum(sides, 0).prod(axis=2).sum(axis=1)
    return areas
