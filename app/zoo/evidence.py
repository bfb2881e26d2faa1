"""The rows of a network's outputs, as those of a head: what they tell against it, and the unit of their boxes."""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app.detection.evidence import BoxFormat, Rows, are_fractions, contradict
from app.model.anchors import is_transposed
from app.zoo.recipe import FRACTIONS, MULTI_CLASS, PIXELS, TENSORS

_HALF = 0.5
_CORNERS = ("end_to_end", "deepstream", "dfine", "four_tensors")


class Evidence(NamedTuple):
    """What the rows tell of a head."""

    contradiction: str
    """Why the rows are not of this head; empty if they may be."""
    box_units: Literal["pixels", "normalized"] | None
    """Unit of the boxes; None if the rows do not tell it, or the head does."""
    is_first_unused: bool | None
    """Whether, of the columns of `rfdetr`, the first is that of no class, and not the last; None if neither is best in a row."""
    sizes: str = ""
    """As in the recipe of `dfine`; empty for other heads."""


def examine(head: str, outputs: Mapping[str, NDArray[Any]], size: tuple[int, int], features: int, *, is_obb: bool) -> Evidence:
    """Examine outputs of a network for one picture of this size, without the batch, as those of a detector with this head."""
    rows = _read(head, {name: tensor.astype(np.float32) for name, tensor in outputs.items()}, size, features)
    has_fractions = are_fractions(rows.boxes) if head in PIXELS else None
    boxes: BoxFormat = "cells" if head == "yolox" else "corners" if head in _CORNERS and not is_obb else "centres"
    contradiction = contradict(rows, boxes, are_always_fractions=head in FRACTIONS, find_little=head == "yolo")
    units: Literal["pixels", "normalized"] | None = None if has_fractions is None else "normalized" if has_fractions else "pixels"
    logits = outputs[TENSORS[head][1]] if head in {"detr", *MULTI_CLASS} else np.zeros((1, 1))
    is_best = logits == logits.max(axis=1, keepdims=True)
    # Most rows find nothing: for softmax, their last logit is the best one; for sigmoids, none is above 0.
    is_nothing = is_best[:, -1] & (head == "detr" or logits[:, -1] > 0)
    if head.startswith("detr") and not contradiction and (is_nothing.mean() > _HALF) != (head == "detr"):
        contradiction = f"its last column is {'not ' if head == 'detr' else ''}that of no object"
    has_first, *_, has_last = is_best[is_best.sum(axis=1) == 1].any(axis=0).tolist() * 2  # not where several are as good
    return Evidence(contradiction, units, not has_first if has_first or has_last else None)


def _read(head: str, tensors: Mapping[str, NDArray[np.float32]], size: tuple[int, int], features: int) -> Rows:
    classes: NDArray[np.float32] | None = None
    if head in TENSORS:
        names = ("boxes", "scores", "labels") if head == "dfine" else TENSORS[head][-3:]
        boxes, scores, *more = (tensors[name] for name in names)
        if not more:  # logits
            more, scores = [scores.argmax(axis=1)], 1 / (1 + np.exp(-scores.max(axis=1)))
        scores, classes = scores[:, None], more[0]
    else:
        table = next(tensor for tensor in tensors.values() if tensor.ndim == 2)  # noqa: PLR2004 - no prototypes
        rows = table.T if head == "yolo" and not is_transposed(table.shape, size) else table
        is_labelled = head in {"end_to_end", "rtdetr_topk", "deepstream"}
        boxes, scores = rows[:, :4], rows[:, 4 : 5 if is_labelled else rows.shape[1] - features]
        classes = rows[:, 5] if is_labelled else None
    keep = (boxes != boxes[-1:]).any(axis=1)  # padding is constant, and at the end
    if classes is not None and head != "deepstream":
        keep &= scores[:, 0] != 0
    return Rows(boxes[keep], scores[keep], None if classes is None else classes[keep])
