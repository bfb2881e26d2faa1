"""Select the requested detections from a model's candidates."""

import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.detection import nms
from app.detection.nms import Candidates
from app.errors import InvalidParameter
from app.expected import suggestion
from app.model.heads import RAW_HEADS, DetectionHead

_ID = re.compile(r"[0-9]{1,9}")


Suppress = Callable[[Candidates, NDArray[np.int32] | None, float], NDArray[np.intp]]
"""Chooses from candidates, as `nms.suppress` does."""


class Suppression(NamedTuple):
    """Rule for duplicate boxes, of which only the best is kept."""

    iou: float
    """Intersection over union, 0 to 1, above which two boxes count as one object."""
    is_agnostic: bool
    """Whether boxes of different classes can count as one object."""
    suppress: Suppress


def to_class_ids(classes: Sequence[str] | None, labels: Sequence[str], *, drops_unknown: bool = False) -> frozenset[int] | None:
    """Look up classes given by name or id; None means all classes. For a model without labels, any id is accepted."""
    if classes is None:
        return None
    wanted, known = set(classes), set(labels)  # thousands of each would be compared with each other
    ids = {index for index, label in enumerate(labels) if label in wanted}
    for name in [name for name in classes if name not in known]:
        if _ID.fullmatch(name) and (not labels or int(name) < len(labels)):
            ids.add(int(name))
        elif not drops_unknown:
            raise InvalidParameter(f"classes: {name[:64]!r} is not a class of this model{suggestion(name, labels)}")
    return frozenset(ids)


def to_suppression(
    iou: float | None, head: DetectionHead, *, is_agnostic: bool, suppress: Suppress = nms.suppress
) -> Suppression | None:
    """Return the suppression to apply to a model's boxes; None if the model's own suppression is sufficient.

    With suppression in both places, a few boxes may differ from a single NMS at the lower threshold: the model may have dropped
    a box because of one that is itself suppressed here.
    """
    if iou is not None and iou > head.max_iou:
        raise InvalidParameter(f"iou: the model itself drops boxes that overlap by more than {head.max_iou:g}, the maximum")
    if not is_agnostic and head.output_format not in RAW_HEADS and iou in {None, head.max_iou}:
        return None
    return Suppression(head.iou if iou is None else iou, is_agnostic, suppress)


def select(
    found: Candidates, *, confidence: float, class_ids: frozenset[int] | None, suppression: Suppression | None = None
) -> Candidates:
    """Return the requested candidates, by descending score; None means all classes, and all duplicate boxes.

    The boxes must not be clipped to the image, because clipping changes overlaps. Candidates that are filtered out do not suppress
    others. Otherwise, with `is_agnostic`, the result would depend on classes that were not requested.
    """
    if not len(found.scores):
        return found
    keep = found.scores >= confidence
    if class_ids is not None:
        keep &= np.isin(found.class_ids, list(class_ids))
    chosen = np.flatnonzero(keep)
    kept = found.take(chosen[np.argsort(-found.scores[chosen], kind="stable")])
    if suppression is None:
        return kept
    with np.errstate(over="ignore", invalid="ignore"):  # areas of huge boxes may overflow
        return kept.take(suppression.suppress(kept, None if suppression.is_agnostic else kept.class_ids, suppression.iou))


def choose_best(boxes: NDArray[np.float32], max_detections: int) -> NDArray[np.intp]:
    """Choose the first boxes (n, 4) that have an area, of those clipped to the image: boxes in the padding have none."""
    x1, y1, x2, y2 = boxes.T
    return np.flatnonzero((x2 > x1) & (y2 > y1))[:max_detections]
