"""A model's output tensors -> rows, whatever the layout; nonsense is refused here, once for all layouts."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from app import nms
from app.contract import Contract, Layout
from app.errors import ModelNonsense

# Scores are probabilities; FP16 models may round a little above one.
_MAX_SCORE = 1.001
_MAX_CLASSES = 2**31


class Rows(NamedTuple):
    """Candidate detections of one picture, in no promised order."""

    boxes: NDArray[np.float32]
    """(n, 4) x1 y1 x2 y2, pixels of the frame."""
    scores: NDArray[np.float32]
    """(n,) 0 to 1."""
    classes: NDArray[np.int32]
    """(n,) ids."""


def read(contract: Contract, outputs: Mapping[str, NDArray[Any]]) -> Rows:
    """Bring the outputs of one inference into one shape.

    Args:
        contract: Of the model that answered.
        outputs: By name, for a batch of one where the model has a batch dimension.

    Raises:
        ModelNonsense: A tensor is missing, of the wrong shape, not finite or out of range.
    """
    tensors = [_one(contract, name, outputs) for name in contract.outputs]
    with np.errstate(over="ignore", invalid="ignore"):  # what overflows is refused below
        rows = _ADAPTERS[contract.layout](contract, tensors)
        if contract.normalized:
            rows = rows._replace(boxes=rows.boxes * np.array(contract.frame * 2, np.float32))
    if not len(rows.scores):
        return rows
    if not np.isfinite(rows.boxes).all():
        raise ModelNonsense(f"{contract.name} returned boxes that are not finite")
    if not (rows.scores.min() >= 0 and rows.scores.max() <= _MAX_SCORE):  # neither holds for a NaN
        raise ModelNonsense(f"{contract.name} returned scores outside 0 to 1")
    if rows.classes.min() < 0:
        raise ModelNonsense(f"{contract.name} returned a negative class id")
    return rows


def _one(contract: Contract, name: str, outputs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    """Take one output without its batch dimension."""
    tensor = outputs.get(name)
    if tensor is None:
        raise ModelNonsense(f"{contract.name} returned no {name}")
    if contract.batched:
        if tensor.ndim == 0 or len(tensor) != 1:
            raise ModelNonsense(f"{contract.name} returned {name} of shape {tensor.shape} for a batch of one")
        tensor = tensor[0]
    return tensor


def _expect(contract: Contract, tensor: NDArray[Any], shape: tuple[int | None, ...]) -> None:
    fits = tensor.ndim == len(shape) and all(want in (None, have) for want, have in zip(shape, tensor.shape, strict=True))
    if not fits:
        raise ModelNonsense(f"{contract.name} returned a tensor of shape {tensor.shape} where {shape} was due")


def _end_to_end(contract: Contract, tensors: list[NDArray[Any]]) -> Rows:
    count, boxes, scores, classes = tensors
    _expect(contract, count, (1,))
    _expect(contract, boxes, (None, 4))
    for tensor in (scores, classes):
        _expect(contract, tensor, (len(boxes),))
    n = int(count[0])
    if not 0 <= n <= len(boxes):
        raise ModelNonsense(f"{contract.name} returned a count of {n} for {len(boxes)} rows")
    return Rows(boxes[:n].astype(np.float32), scores[:n].astype(np.float32), _ids(classes[:n]))


def _six_columns(contract: Contract, tensors: list[NDArray[Any]]) -> Rows:
    (table,) = tensors
    _expect(contract, table, (None, 6))
    table = table.astype(np.float32)
    table = table[~(table[:, 4] <= 0)]  # padding; written so that a NaN stays and is refused
    return Rows(table[:, :4], table[:, 4], _ids(table[:, 5]))


def _yolo_head(contract: Contract, tensors: list[NDArray[Any]]) -> Rows:
    (head,) = tensors
    _expect(contract, head, (None, None))
    _expect_classes(contract, head, len(head) - 4)
    return Rows(*nms.from_yolo(head.astype(np.float32), contract.iou))


def _yolox_head(contract: Contract, tensors: list[NDArray[Any]]) -> Rows:
    (head,) = tensors
    _expect(contract, head, (len(nms.cells(contract.frame)[0]), None))
    _expect_classes(contract, head, head.shape[1] - 5)
    return Rows(*nms.from_yolox(head.astype(np.float32), contract.iou, contract.frame))


def _expect_classes(contract: Contract, head: NDArray[Any], classes: int) -> None:
    if classes < 1:
        raise ModelNonsense(f"{contract.name} returned a head of shape {head.shape}, which leaves no room for classes")
    if not np.isfinite(head).all():
        raise ModelNonsense(f"{contract.name} returned a head that is not finite")


def _ids(classes: NDArray[Any]) -> NDArray[np.int32]:
    """Take class ids from whatever type; what is no id becomes -1, which is refused."""
    if classes.dtype == np.int32:
        return classes
    ids = classes.astype(np.float64)
    return np.where((ids >= 0) & (ids < _MAX_CLASSES), ids, -1).astype(np.int32)


_ADAPTERS = {
    Layout.END_TO_END: _end_to_end,
    Layout.SIX_COLUMNS: _six_columns,
    Layout.YOLO_HEAD: _yolo_head,
    Layout.YOLOX_HEAD: _yolox_head,
}
