"""Which of a model's candidates the caller wants."""

import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from app.detection.outputs import Candidates
from app.errors import InvalidParameter

_ID = re.compile(r"[0-9]{1,9}")


class Criteria(NamedTuple):
    """What the caller asked for."""

    confidence: float
    """Least score."""
    classes: Sequence[str] | None
    """Names or ids; None for all classes."""
    max_detections: int

    def class_ids(self, labels: Sequence[str]) -> frozenset[int] | None:
        """Look the classes up; None for all.

        Args:
            labels: The model's class names by id; without them, any id is accepted.

        Raises:
            InvalidParameter: A class is neither a name nor an id of this model.
        """
        if self.classes is None:
            return None
        ids = set()
        for name in self.classes:
            if name in labels:
                ids.add(labels.index(name))
            elif _ID.fullmatch(name) and (not labels or int(name) < len(labels)):
                ids.add(int(name))
            else:
                raise InvalidParameter(f"classes: {name[:64]!r} is not a class of this model")
        return frozenset(ids)


def select(found: Candidates, criteria: Criteria, class_ids: frozenset[int] | None) -> Candidates:
    """Keep the best candidates that meet the criteria, by descending score.

    Args:
        found: Of one image.
        criteria: What to keep.
        class_ids: The criteria's classes, looked up for this model.
    """
    if not len(found.scores):
        return found
    keep = found.scores >= criteria.confidence
    if class_ids is not None:
        keep &= np.isin(found.class_ids, list(class_ids))
    chosen = np.flatnonzero(keep)
    order = chosen[np.argsort(-found.scores[chosen], kind="stable")][: criteria.max_detections]
    return Candidates(found.boxes[order], found.scores[order], found.class_ids[order])
