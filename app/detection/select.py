"""Select from a model's candidates those that the caller wants."""

import re
from collections.abc import Sequence

import numpy as np

from app.detection.outputs import Candidates
from app.errors import InvalidParameter

_ID = re.compile(r"[0-9]{1,9}")


def to_class_ids(classes: Sequence[str] | None, labels: Sequence[str]) -> frozenset[int] | None:
    """Look up classes given by name or id; None means all classes.

    Args:
        classes: Names or ids.
        labels: The model's class names by id; without them, any id is accepted.

    Raises:
        InvalidParameter: A class is neither a name nor an id of this model.
    """
    if classes is None:
        return None
    ids = set()
    for name in classes:
        if name in labels:
            ids.add(labels.index(name))
        elif _ID.fullmatch(name) and (not labels or int(name) < len(labels)):
            ids.add(int(name))
        else:
            raise InvalidParameter(f"classes: {name[:64]!r} is not a class of this model")
    return frozenset(ids)


def select(found: Candidates, *, confidence: float, class_ids: frozenset[int] | None, max_detections: int) -> Candidates:
    """Keep the best candidates that have an area, by descending score.

    Args:
        found: The candidates of one image, clipped to it: those that lie in the padding around it have no area then.
        confidence: Minimum score.
        class_ids: The classes to keep; None for all.
        max_detections: How many to keep at most.
    """
    if not len(found.scores):
        return found
    keep = found.scores >= confidence
    if class_ids is not None:
        keep &= np.isin(found.class_ids, list(class_ids))
    x1, y1, x2, y2 = found.boxes.T
    keep &= (x2 > x1) & (y2 > y1)
    chosen = np.flatnonzero(keep)
    order = chosen[np.argsort(-found.scores[chosen], kind="stable")][:max_detections]
    return Candidates(found.boxes[order], found.scores[order], found.class_ids[order])
