"""Find the lines of text in the map of a text detector, in reading order.

The rules, their order and their rounding are those of RapidOCR, so that boxes agree. Source: DBPostProcess in
rapidocr/ch_ppocr_det/utils.py, and TextDetector.sorted_boxes in rapidocr/ch_ppocr_det/main.py, with the values of its config.yaml.
"""

from typing import Any

import cv2
import numpy as np
import pyclipper
from numpy.typing import NDArray

from app.errors import DeadlinePassed
from app.imaging.fit import page_size
from app.imaging.transform import ImageTransform
from app.resilience.deadline import Deadline

# Above .3 of 255, a pixel belongs to text.
_TEXT = 76
_NEIGHBOURS = np.ones((2, 2), np.uint8)
# A map of noise has hundreds of thousands of contours.
_MAX_CANDIDATES = 1000
# The network is trained on lines that are shrunk by an offset of area / perimeter, times this.
_UNCLIP_RATIO = 1.6
# Of the shorter side, in pixels of the map, before lines are enlarged and after that; in pixels of the page, both sides are longer.
_MIN_SIDE, _MIN_ENLARGED_SIDE, _MIN_PAGE_SIDE = 3, 5, 4
# Lines that begin less than this below each other are read from left to right, in pixels of the page.
_ROW_DISTANCE = 10

_Points = NDArray[Any]


def find_regions(
    found: NDArray[np.uint8], transform: ImageTransform, confidence: float, deadline: Deadline
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Find lines of text, at most a thousand, with at least this mean probability; raises DeadlinePassed.

    `found` (height, width) is, for each pixel of the input, the probability that it belongs to text, of 255. Returns the corners
    (n, 4, 2) x y in pixels of the upright image, clockwise from the top left, and the scores (n,).
    """
    mask = cv2.dilate((found > _TEXT).view(np.uint8), _NEIGHBOURS)
    contours, _ = cv2.findContours(mask, cv2.RETR_LIST, cv2.CHAIN_APPROX_SIMPLE)
    page = np.array(page_size(transform.image_width, transform.image_height), np.float32)
    scale = np.array([transform.image_width, transform.image_height], np.float32) / page
    lines: list[_Points] = []
    scores: list[float] = []
    for contour in contours[:_MAX_CANDIDATES]:
        if deadline.remaining <= 0:
            raise DeadlinePassed("there was no time for all lines of text")
        core, side = _enclose(contour)
        if side < _MIN_SIDE or (score := _mean_probability(found, core)) < confidence:
            continue
        line, side = _enclose(_enlarge(core))
        if side < _MIN_ENLARGED_SIDE:
            continue
        line = np.clip(np.rint(transform.points_to_image(line) / scale), 0, page - 1)
        if min(np.linalg.norm(line[1] - line[0]), np.linalg.norm(line[3] - line[0])) >= _MIN_PAGE_SIDE:
            lines.append(line)
            scores.append(score)
    corners: NDArray[np.float32] = np.array(lines, np.float32).reshape(-1, 4, 2)
    order = _reading_order(corners[:, 0])
    return corners[order] * scale, np.array(scores, np.float32)[order]


def _enclose(points: _Points) -> tuple[_Points, float]:
    """Return the corners (4, 2) of the smallest rectangle around points, clockwise from the top left, and its shorter side."""
    rectangle = cv2.minAreaRect(points)
    corners = cv2.boxPoints(rectangle)
    columns = corners[np.argsort(corners[:, 0], kind="stable")]
    left, right = (pair[np.argsort(pair[:, 1], kind="stable")] for pair in (columns[:2], columns[2:]))
    return np.stack([left[0], right[0], right[1], left[1]]), min(rectangle[1])


def _mean_probability(found: NDArray[np.uint8], corners: _Points) -> float:
    """Return the mean probability, 0 to 1, of the pixels between four corners."""
    limit = np.array(found.shape[::-1]) - 1
    start = np.clip(np.floor(corners.min(axis=0)), 0, limit).astype(np.int32)
    end = np.clip(np.ceil(corners.max(axis=0)), 0, limit).astype(np.int32) + 1
    (left, top), (right, bottom) = start.tolist(), end.tolist()
    inside = np.zeros((bottom - top, right - left), np.uint8)
    cv2.fillPoly(inside, (corners - start).astype(np.int32)[None], 1)
    return float(cv2.mean(found[top:bottom, left:right], inside)[0]) / 255


def _enlarge(corners: _Points) -> NDArray[np.int32]:
    """Return a polygon (n, 2) around a rectangle, at the distance by which the lines of the network's training were shrunk."""
    area, perimeter = cv2.contourArea(corners), cv2.arcLength(corners, closed=True)
    offset = pyclipper.PyclipperOffset()
    offset.AddPath(corners.tolist(), pyclipper.JT_ROUND, pyclipper.ET_CLOSEDPOLYGON)
    return np.array(offset.Execute(area * _UNCLIP_RATIO / perimeter)[0], np.int32)


def _reading_order(starts: _Points) -> NDArray[np.intp]:
    """Return the indices of lines that start at these points (n, 2), row by row."""
    by_height = np.argsort(starts[:, 1], kind="stable")
    rows = np.cumsum(np.diff(starts[by_height, 1], prepend=0) >= _ROW_DISTANCE)
    return by_height[np.lexsort((starts[by_height, 0], rows))]
