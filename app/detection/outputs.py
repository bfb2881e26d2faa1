"""Decode a detector's output tensors in any supported format, and reject invalid outputs."""

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from app.detection import nms
from app.detection.evidence import Rows
from app.detection.nms import Candidates
from app.errors import InvalidModelOutput
from app.model.anchors import count_anchors, is_transposed
from app.model.heads import HEADS, DetectionHead, ObbHead, OutputFormat
from app.model.outputs import MAX_PROBABILITY, expect_shape, take_outputs
from app.model.spec import ModelSpec

_MAX_CLASSES, _ROUNDING = 2**31, 0.05
# Far more than pixels of any image; what follows from such numbers is finite.
_MAX_VALUE = 1e9


def decode_outputs(spec: ModelSpec, outputs: Mapping[str, NDArray[Any]]) -> Candidates:
    """Decode the output tensors for one image, with a batch dimension of 1 or none.

    Raises InvalidImage if the model could not decode it, or InvalidModelOutput, also for values that are not finite.
    """
    head, tensors = spec.expect_head(HEADS.get(spec.head.task, DetectionHead)), take_outputs(spec, outputs)
    with np.errstate(over="ignore", invalid="ignore"):  # an overflow is rejected below
        found = _DECODERS[head.output_format](spec, tensors)
        if head.has_normalized_boxes:
            found = found._replace(boxes=found.boxes * np.array(spec.input_size * 2, np.float32))
    if not len(found.scores):
        return found
    values = found.boxes if found.features is None else np.concatenate([found.boxes, found.features], axis=1)
    if not (np.abs(values) < _MAX_VALUE).all():  # written so that NaN fails
        raise InvalidModelOutput(f"{spec.name} returned objects with values that are not finite or far too large")
    if not (found.scores.min() >= 0 and found.scores.max() <= MAX_PROBABILITY):  # written so that NaN fails
        raise InvalidModelOutput(f"{spec.name} returned scores outside 0 to 1")
    if found.class_ids.min() < 0:
        raise InvalidModelOutput(f"{spec.name} returned an invalid class id")
    return found._replace(scores=np.minimum(found.scores, 1))


def raw_rows(spec: ModelSpec, outputs: Mapping[str, NDArray[Any]]) -> Rows:
    """Return all rows in the outputs for one image, as they are, but no padding; raise InvalidModelOutput."""
    head, tensors = spec.expect_head(DetectionHead), take_outputs(spec, outputs)
    with np.errstate(over="ignore", invalid="ignore"):
        _DECODERS[head.output_format](spec, tensors)  # rejects other shapes
    first, *more = (tensor.astype(np.float32) for tensor in tensors)
    match head.output_format:
        case OutputFormat.END_TO_END:
            rows = Rows(more[0], more[1][:, None], more[2])
            is_valid = np.arange(len(rows.boxes)) < int(first[0])
        case OutputFormat.SIX_COLUMNS | OutputFormat.DEEPSTREAM:
            rows, is_valid = Rows(first[:, :4], first[:, 4:5], first[:, 5]), first[:, 4] != 0
        case output_format:
            is_upright = output_format is OutputFormat.YOLO_HEAD and not is_transposed(first.shape, spec.input_size)
            table = first.T if is_upright else first
            rows, is_valid = Rows(table[:, :4], table[:, 4:], None), np.ones(len(table), bool)
    is_first = (np.arange(len(rows.boxes)) == 0) & (rows.scores > 0).any(axis=1)
    is_valid &= (rows.boxes != rows.boxes[-1:]).any(axis=1) | is_first
    return Rows(rows.boxes[is_valid], rows.scores[is_valid], None if rows.classes is None else rows.classes[is_valid])


def _decode_end_to_end(spec: ModelSpec, tensors: list[NDArray[Any]]) -> Candidates:
    count, boxes, scores, classes, *more = tensors
    expect_shape(spec, count, (1,))
    expect_shape(spec, boxes, (*boxes.shape[:1], 4))
    for tensor in (scores, classes):
        expect_shape(spec, tensor, (len(boxes),))
    n = int(count[0])
    if not 0 <= n <= len(boxes):
        raise InvalidModelOutput(f"{spec.name} returned a count of {n} for {len(boxes)} rows")
    found = Candidates(boxes[:n].astype(np.float32), scores[:n].astype(np.float32), _to_class_ids(classes[:n]))
    if not (features := spec.head.features):
        return found
    table = more[0].reshape(*more[0].shape[:1], prod(more[0].shape[1:]))
    expect_shape(spec, table, (len(boxes), features))
    return found._replace(features=table[:n].astype(np.float32))


def _decode_six_columns(spec: ModelSpec, tensors: list[NDArray[Any]]) -> Candidates:
    table, features = tensors[0], spec.head.features
    expect_shape(spec, table, (None, 6 + features))
    table = table.astype(np.float32)
    table = table[~(table[:, 4] <= 0)]  # drops padding, but keeps NaN, which is rejected later
    boxes = nms.to_corners(table[:, :4]) if isinstance(spec.head, ObbHead) else table[:, :4]
    return Candidates(boxes, table[:, 4], _to_class_ids(table[:, 5]), table[:, 6:] if features else None)


def _decode_deepstream(spec: ModelSpec, tensors: list[NDArray[Any]]) -> Candidates:
    found = _decode_six_columns(spec, tensors)
    if not np.isfinite(found.scores).all():
        raise InvalidModelOutput(f"{spec.name} returned scores outside 0 to 1")
    best = np.argsort(-found.scores, kind="stable")[: nms.MAX_CANDIDATES]
    return found.take(best[found.scores[best] > nms.MIN_SCORE])


def _decode_yolo_head(spec: ModelSpec, tensors: list[NDArray[Any]]) -> Candidates:
    tensor = tensors[0]
    expect_shape(spec, tensor, (None, None))
    return _decode_columns(spec, tensor.T if is_transposed(tensor.shape, spec.input_size) else tensor)


def _decode_columns(spec: ModelSpec, tensor: NDArray[Any]) -> Candidates:
    features = spec.head.features
    _expect_classes(spec, tensor, len(tensor) - 4 - features)
    return nms.from_yolo(tensor.astype(np.float32), features=features)


def _decode_yolov5_head(spec: ModelSpec, tensors: list[NDArray[Any]]) -> Candidates:
    (tensor,) = tensors
    expect_shape(spec, tensor, (None, None))
    _expect_classes(spec, tensor, tensor.shape[1] - 5)
    return nms.from_yolov5(tensor.astype(np.float32))


def _decode_yolox_head(spec: ModelSpec, tensors: list[NDArray[Any]]) -> Candidates:
    (tensor,) = tensors
    expect_shape(spec, tensor, (count_anchors(spec.input_size), None))
    _expect_classes(spec, tensor, tensor.shape[1] - 5)
    return nms.from_yolox(tensor.astype(np.float32), spec.input_size)


def _decode_rtdetr(spec: ModelSpec, tensors: list[NDArray[Any]]) -> Candidates:
    """Decode rows that hold what the columns of a YOLO head hold; `decode_outputs` scales their fractions."""
    (tensor,) = tensors
    expect_shape(spec, tensor, (None, None))
    return _decode_columns(spec, tensor.T)


def _expect_classes(spec: ModelSpec, head: NDArray[Any], classes: int) -> None:
    if classes < 1:
        raise InvalidModelOutput(f"{spec.name} returned a head of shape {head.shape}, which has no class scores")
    if not np.isfinite(head).all():
        raise InvalidModelOutput(f"{spec.name} returned a head that is not finite")


def _to_class_ids(classes: NDArray[Any]) -> NDArray[np.int32]:
    """Convert class ids of any type to INT32, also 1.999 of FP16; invalid values become -1, which is rejected."""
    if classes.dtype == np.int32:
        return classes
    values = classes.astype(np.float64)
    ids = np.rint(values)
    return np.where((ids >= 0) & (ids < _MAX_CLASSES) & (np.abs(values - ids) <= _ROUNDING), ids, -1).astype(np.int32)


_DECODERS = {
    OutputFormat.END_TO_END: _decode_end_to_end,
    OutputFormat.SIX_COLUMNS: _decode_six_columns,
    OutputFormat.DEEPSTREAM: _decode_deepstream,
    OutputFormat.YOLO_HEAD: _decode_yolo_head,
    OutputFormat.YOLOV5_HEAD: _decode_yolov5_head,
    OutputFormat.YOLOX_HEAD: _decode_yolox_head,
    OutputFormat.RTDETR: _decode_rtdetr,
}
