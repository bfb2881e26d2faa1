"""What the rows of a detector for a picture tell of it, whatever it finds there: formats and units are the same in all pictures."""

from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

# Of rows that differ: fewer tell nothing.
_MIN_ROWS = 20
# The share of rows that may be otherwise: INT8 rounds, and a network may be wrong somewhere.
_FEW = 0.01
# Of boxes in fractions of the input.
_MOST = 0.9
# INT8 rounds scores of the background to slightly less than 0.
_LEAST_SCORE = -0.05
# Of the largest coordinate: a box of the background may be slightly turned.
_SLACK = 0.02
# exp of more is a box far larger than any input.
_MAX_LOG_SIZE = 20
_ROUNDING = 0.05
_SCORE_AND_CLASS = 2
# Scores of a network with only classes are lower in 97 % of the rows for a photo. Of one with an objectness, which is less, or 1 as
# that of YOLOv6, most rows have a class with more: 97 % of YOLOX-Nano's.
_LOW_SCORE, _ONE = 0.05, 0.99
_HALF = 0.5

LOGITS, CORNERS, IS_CLASS = "its scores are logits", "its boxes are x1 y1 x2 y2", "its last column is a class"
OBJECTNESS = "its first score is an objectness, and not that of a class"
DECODED, IN_CELLS = "its boxes are decoded", "its boxes have negative sizes, as those of a raw YOLOX"
"""Reasons that tell how to mend it."""

BoxFormat = Literal["corners", "centres", "cells"]
"""x1 y1 x2 y2; centre and size; offset and log size in cells."""


class Rows(NamedTuple):
    """Rows for one picture, without padding."""

    boxes: NDArray[np.float32]
    """(n, 4)."""
    scores: NDArray[np.float32]
    """(n, scores), probabilities."""
    classes: NDArray[np.float32] | None
    """(n,); None if each class has a score."""


def are_fractions(boxes: NDArray[np.float32]) -> bool | None:
    """Return whether boxes (n, 4) are fractions of the input, and not pixels; None if there are none with a size."""
    largest = np.abs(boxes).max(axis=1)
    sized = largest[largest > 0]
    return float(np.mean(sized <= 2)) > _MOST if len(sized) else None  # noqa: PLR2004 - most boxes end beyond the second pixel


def contradict(rows: Rows, boxes: BoxFormat, *, are_always_fractions: bool, find_little: bool) -> str:
    """Return why rows cannot have such boxes, and probabilities as scores; empty if they may, or tell nothing.

    `find_little`: there is a row for each place, so that most find nothing, and no score but those of classes.
    """
    if len(rows.boxes) < _MIN_ROWS or not np.isfinite(rows.boxes).all():
        return ""
    if _share(rows.scores.max(axis=1) < _LEAST_SCORE) > _FEW:
        return f"{LOGITS}, such as {rows.scores.min():.1f}: export it with its sigmoid"
    if reason := _contradict_boxes(rows.boxes, boxes):
        return reason
    if are_always_fractions and not are_fractions(rows.boxes):
        return "its boxes are no fractions of the input"
    last = rows.scores[:, -1] if rows.classes is None else rows.classes
    is_class = _share(np.abs(last - np.round(last)) > _ROUNDING) <= _FEW
    if rows.classes is not None:
        return "" if is_class else "its last column is not a class"
    # FP16 may round the score of a single class to 1 in all rows.
    is_one = is_class and rows.scores.shape[1] == _SCORE_AND_CLASS and last.max() >= max(1, last.min() + 0.5)
    first, others = rows.scores[:, 0], rows.scores[:, 1:].max(axis=1, initial=0)
    is_objectness = (others > _LOW_SCORE) & ((first <= _LOW_SCORE) | (first > _ONE))
    return IS_CLASS if is_one else OBJECTNESS if find_little and _share(is_objectness) > _HALF else ""


def _contradict_boxes(boxes: NDArray[np.float32], kind: BoxFormat) -> str:
    sizes, slack = boxes[:, 2:], _SLACK * np.abs(boxes).max()
    if kind == "cells" and float(sizes.max()) <= _MAX_LOG_SIZE and (float(boxes.min()) < 0 or not are_fractions(boxes)):
        return ""
    if kind == "corners":
        return "its boxes are not x1 y1 x2 y2" if _share((sizes < boxes[:, :2] - slack).any(axis=1)) > _FEW else ""
    if (sizes >= boxes[:, :2]).all():
        return CORNERS
    if kind == "cells":
        return DECODED
    return IN_CELLS if _share(sizes.min(axis=1) < -slack) > _FEW else ""


def _share(values: NDArray[np.bool_] | np.bool_) -> float:
    return float(np.mean(values))
