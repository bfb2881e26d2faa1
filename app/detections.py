"""Rows -> named detections, as the caller asked for them."""

import re
from collections.abc import Sequence

import numpy as np

from app.errors import InvalidParameter
from app.letterbox import Placement
from app.rows import Rows
from app.schema import Detection, Unit

# A ten-thousandth of the score, a hundredth of a pixel, a sixtieth of a pixel at the widest picture.
_SCORE_DIGITS = 4
_PIXEL_DIGITS = 2
_FRACTION_DIGITS = 6
_ID = re.compile(r"[0-9]{1,9}")


def class_ids(wanted: Sequence[str], labels: Sequence[str]) -> frozenset[int]:
    """Find the ids of classes given by name or id.

    Raises:
        InvalidParameter: One of them is neither.
    """
    ids = set()
    for name in wanted:
        if name in labels:
            ids.add(labels.index(name))
        elif _ID.fullmatch(name) and (not labels or int(name) < len(labels)):
            ids.add(int(name))
        else:
            raise InvalidParameter(f"classes: {name[:64]!r} is not a class of this model")
    return frozenset(ids)


def select(rows: Rows, *, confidence: float, classes: frozenset[int] | None, limit: int) -> Rows:
    """Keep the rows of at least `confidence` and of `classes` (None: all), the `limit` best, best first."""
    if not len(rows.scores):
        return rows
    keep = rows.scores >= confidence
    if classes is not None:
        keep &= np.isin(rows.classes, list(classes))
    chosen = np.flatnonzero(keep)
    order = chosen[np.argsort(-rows.scores[chosen], kind="stable")][:limit]
    return Rows(rows.boxes[order], rows.scores[order], rows.classes[order])


def name(rows: Rows, placement: Placement, labels: Sequence[str], unit: Unit) -> list[Detection]:
    """Map the boxes to the picture and say what they are.

    Args:
        rows: Boxes in pixels of the frame.
        placement: Of the picture in the frame.
        labels: Class names by id; an id beyond them is its own name.
        unit: `normalized` 0..1 of the picture, `pixel`, or `coco` x y width height in pixels.
    """
    if not len(rows.scores):
        return []
    boxes = placement.to_picture(rows.boxes).astype(np.float64)
    if unit == "normalized":
        boxes /= np.array([placement.picture_width, placement.picture_height] * 2)
    elif unit == "coco":
        boxes[:, 2:] -= boxes[:, :2]
    digits = _FRACTION_DIGITS if unit == "normalized" else _PIXEL_DIGITS
    numbers = boxes.round(digits).tolist()
    scores = rows.scores.astype(np.float64).tolist()
    return [
        Detection(
            **({"bbox": tuple(box)} if unit == "coco" else dict(zip(("x1", "y1", "x2", "y2"), box, strict=True))),
            confidence=min(round(score, _SCORE_DIGITS), 1.0),
            class_=id_,
            class_id=id_,
            class_name=labels[id_] if id_ < len(labels) else str(id_),
        )
        for box, score, id_ in zip(numbers, scores, rows.classes.tolist(), strict=True)
    ]
