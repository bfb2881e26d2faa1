"""The graphs from the head of a network to the results of its task."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import onnx
from onnx import TensorProto, compose, numpy_helper

from app.detection.nms import MAX_CANDIDATES, MAX_DETECTIONS
from app.model.anchors import anchor_grid, count_anchors, is_transposed
from app.zoo.graph import FP32, INT32, Graph, Value
from app.zoo.oriented import suppress_oriented
from app.zoo.recipe import (
    ANCHORS_OF_SAMPLE,
    DETECTIONS,
    FRACTIONS,
    MULTI_CLASS,
    PIXELS,
    RAW_HEADS,
    ClassificationRecipe,
    DetectionRecipe,
    EmbeddingRecipe,
    ObbRecipe,
    Recipe,
    SegmentationRecipe,
    TextDetectionRecipe,
    measure,
)

# Pairs of an anchor and a class before the NMS, as in Ultralytics' validation.
_MAX_PAIRS = 30_000


def build(shapes: Sequence[Sequence[int]], recipe: Recipe, classes: int | None) -> onnx.ModelProto:
    """Build the graph that follows a network with outputs of these shapes; raise ValueError if they are not the recipe's head.

    The inputs are in the order of `TENSORS`, prototypes last; shapes are without the batch, with 0 for dynamic dimensions.
    `classes` is their number where the shapes do not tell it: `rfdetr`, `deepstream`. The outputs are those of the recipe. A
    detector also has `DETECTIONS`, x1 y1 x2 y2 in pixels of the input, for oriented boxes before the rotation, by descending score,
    with zeros past `num_dets`, and `SAMPLE`; a classifier `probabilities` FP32 (batch, classes).
    """
    graph, kinds = Graph(), recipe.outputs
    if isinstance(recipe, DetectionRecipe):
        values, kinds = _find(graph, shapes, recipe, classes), DETECTIONS | kinds | recipe.sample
    elif isinstance(recipe, ClassificationRecipe):
        if len(shapes[0]) != 1 or shapes[0][0] < 2:  # noqa: PLR2004 - at least two classes
            raise ValueError(f"the output {_text(shapes)} is not a number for each class")
        kinds = {"probabilities": ("FP32", (shapes[0][0],))}
        head = graph.input("head", shapes[0][0])
        values = [head.op("Softmax", axis=1) if recipe.head == "logits" else head.op("Identity")]
    elif isinstance(recipe, EmbeddingRecipe):
        if [*shapes[0]] != [recipe.dimensions]:
            raise ValueError(f"the output {_text(shapes)} is not a vector of {recipe.dimensions} values")
        values = [graph.input("head", recipe.dimensions).op("Identity")]
    elif isinstance(recipe, TextDetectionRecipe):
        probabilities = graph.input("head", 1, "height", "width").op("Squeeze", [1])
        values = [(probabilities * 255.0).op("Round").op("Cast", to=TensorProto.UINT8)]
    else:
        steps = graph.input("head", "steps", "characters")
        best = steps.op("ArgMax", axis=2, keepdims=0)
        values = [best.op("Cast", to=INT32), steps.op("ReduceMax", axes=[2], keepdims=0)]
    outputs = {name: (value, *kind) for value, (name, kind) in zip(values, kinds.items(), strict=True)}
    return compose.add_prefix(graph.build("after", outputs), "after/", rename_outputs=False)


def _find(graph: Graph, shapes: Sequence[Sequence[int]], recipe: DetectionRecipe, classes: int | None) -> list[Value]:
    # The results are in the order of `DETECTIONS`, the outputs of the recipe and its sample.
    head, features, is_obb = recipe.head, recipe.features, isinstance(recipe, ObbRecipe)
    found = measure(shapes[:1] if features else shapes, head, recipe.size, features)
    if found is None:
        raise ValueError(f"the output {_text(shapes)} is not a {head} head for {recipe.size[0]} x {recipe.size[1]} pixels")
    rows, count = found[0] or count_anchors(recipe.size), found[1]
    if head == "rfdetr" and classes == count + 1:  # no column is unused
        count += 1
    if head == "deepstream":
        count = classes or 1
    least = min([rows, *(rows * x * y // (recipe.size[0] * recipe.size[1]) for x, y in recipe.shapes if head in RAW_HEADS)])
    # Each pair of oriented candidates is compared.
    candidates = min(MAX_CANDIDATES if is_obb else _MAX_PAIRS, least * count) if recipe.multi_label else min(MAX_CANDIDATES, least)
    limit = min(MAX_DETECTIONS, rows * count if head in MULTI_CLASS else candidates)
    if head in RAW_HEADS:
        cells = _decode_cells(graph, shapes[0], recipe, count)
        boxes, kept, label, place = _pick(cells, recipe, (rows, count), candidates, limit)
        columns, spread = cells.features, np.linspace(0, rows - 1, ANCHORS_OF_SAMPLE).astype(np.int64)
        sizes = cells.size.op("Gather", np.where(spread < rows / 2, spread, spread - rows), axis=2).op("Reshape", [0, -1])
        sample = sizes.op("Concat", cells.size.op("ReduceMean", axes=[2], keepdims=0), axis=1)
    else:
        boxes, score, label, columns = _decode_rows(graph, recipe, (rows, count), limit)
        place, kept = None, (score > recipe.floor).op("Where", score, 0.0)
        used = (score > 0.0).op("Cast", to=FP32).op("ReduceMean", axes=[1], keepdims=1)
        sample = boxes.op("ReduceMean", axes=[1], keepdims=0).op("Concat", used, axis=1)
    if head in FRACTIONS or (head in PIXELS and recipe.box_units == "normalized"):
        boxes *= [float(side) for side in recipe.size * 2]

    scores, order = kept.top(limit)
    is_valid = scores > 0.0
    valid, valid_rows = is_valid.op("Cast", to=INT32), is_valid.op("Cast", to=FP32).op("Unsqueeze", [2])
    ordered = boxes.take(order.op("Unsqueeze", [2]).op("Tile", [1, 1, 4]))
    results = [ordered * valid_rows, scores, label.take(order).op("Cast", to=INT32) * valid]
    if columns:
        results.append(columns.take_columns(place.take(order) if place else order, features).swap() * valid_rows)
    if missing := MAX_DETECTIONS - limit:  # Triton demands the rows that the config states, also of a network that gives fewer
        results = [
            result.op("Pad", [0, 0, 0, 0, missing, 0] if is_matrix else [0, 0, 0, missing])
            for result, is_matrix in zip(results, (True, False, False, True), strict=False)
        ]
    if columns:
        results[3] = results[3].op("Reshape", [0, *next(shape for _, shape in recipe.outputs.values())])
    if isinstance(recipe, SegmentationRecipe):
        results.append(graph.input("planes", "count", "height", "width").op("Cast", to=TensorProto.FLOAT16))
    return [valid.op("ReduceSum", [1], keepdims=1), *results, sample]


def _pick(
    cells: "_Cells", recipe: DetectionRecipe, counts: tuple[int, int], candidates: int, limit: int
) -> tuple[Value, Value, Value, Value]:
    # Boxes (batch, n, 4), scores, 0 if suppressed, classes and anchors (batch, n) of the best candidates. Counts: anchors, classes.
    anchors, classes = cells.scores.op("Shape", start=2, end=3) if recipe.shapes else counts[0], counts[1]
    # The number of candidates is limited before the NMS to bound its cost.
    if recipe.multi_label:
        score, pair = cells.scores.op("Reshape", [0, -1]).top(candidates)
        label, place = pair // anchors, pair % anchors
    else:
        score, place = cells.scores.op("ReduceMax", axes=[1], keepdims=0).top(candidates)
        label = cells.scores.op("ArgMax", axis=1, keepdims=0).take(place)
    boxes = _to_corners(cells.centre, cells.size).take_columns(place, 4).swap()
    if isinstance(recipe, ObbRecipe) and cells.features:
        geometry = cells.centre.op("Concat", cells.size, cells.features, axis=1).take_columns(place, 5)
        return boxes, suppress_oriented(geometry, score, label, recipe, limit), label, place
    return boxes, _suppress(boxes, score, label, classes, recipe, limit), label, place


def _text(shapes: Sequence[Sequence[int]]) -> str:
    return " and ".join(str(("batch", *shape)).replace("'", "") for shape in shapes)


class _Cells(NamedTuple):
    centre: Value
    """(batch, 2, anchors) x y."""
    size: Value
    """(batch, 2, anchors)."""
    scores: Value
    """(batch, classes, anchors)."""
    features: Value | None = None
    """(batch, features, anchors)."""


def _decode_cells(graph: Graph, shape: Sequence[int], recipe: DetectionRecipe, classes: int) -> _Cells:
    if recipe.head == "yolo":
        columns = graph.input("columns", "first", "second")
        columns = columns.swap() if is_transposed(shape, recipe.size) else columns
        return _Cells(*columns.split(2, 2, classes, *_parts(recipe)))
    if recipe.head == "deepstream":
        first, last, score, label = graph.input("head", "rows", 6).swap().split(2, 2, 1, 1)
        ids = label.op("Squeeze", [1]).op("Round").op("Cast", to=TensorProto.INT64)
        return _Cells((first + last) / 2.0, last - first, ids.op("OneHot", [classes], [0.0, 1.0], axis=1) * score)
    centre, size, objectness, likelihood = graph.input("head", "rows", "channels").swap().split(2, 2, 1, classes)
    if recipe.head == "yolox":
        grid, strides = (graph.constant(np.ascontiguousarray(values.T[None])) for values in anchor_grid(recipe.size))
        centre, size = (centre + grid) * strides, size.op("Exp") * strides
    return _Cells(centre, size, objectness * likelihood)


def _decode_rows(
    graph: Graph, recipe: DetectionRecipe, counts: tuple[int, int], limit: int
) -> tuple[Value, Value, Value, Value | None]:
    # Boxes (batch, rows, 4), scores and classes (batch, rows), features (batch, features, rows). A row of several scores counts
    # only for its best class, as in the detectors' own post-processing, except in `MULTI_CLASS`. Counts: rows, classes.
    rows, classes = counts
    if recipe.head == "dfine":
        label = graph.input("label", "rows", kind="INT64")
        return graph.input("boxes", "rows", 4), graph.input("score", "rows"), label, None
    if recipe.head == "four_tensors":
        count, boxes = graph.input("count", 1, kind="INT64"), graph.input("boxes", "rows", 4)
        score, label = graph.input("score", "rows"), graph.input("label", "rows", kind="INT64")
        is_valid = graph.constant(np.arange(rows)[None]).op("Less", count)
        return boxes, is_valid.op("Where", score, 0.0), label, None
    if recipe.head in {"detr", *MULTI_CLASS}:
        boxes = _to_corners(*graph.input("dets", "rows", 4).swap().split(2, 2)).swap()
        logits = graph.input("labels", "rows", "channels")
        used = (logits.op("Softmax", axis=2) if recipe.head == "detr" else logits).op("Slice", [0], [classes], [2])
        if recipe.head == "detr":
            return boxes, used.op("ReduceMax", axes=[2], keepdims=0), used.op("ArgMax", axis=2, keepdims=0), None
        logit, position = used.op("Reshape", [0, -1]).top(limit)
        query = (position // classes).op("Unsqueeze", [2]).op("Tile", [1, 1, 4])
        return boxes.take(query), logit.op("Sigmoid"), position % classes, None
    columns = graph.input("head", "rows", "channels").swap()
    if recipe.head == "rtdetr":
        centre, size, scores = columns.split(2, 2, classes)
        best = scores.op("ReduceMax", axes=[1], keepdims=0), scores.op("ArgMax", axis=1, keepdims=0)
        return _to_corners(centre, size).swap(), *best, None
    centre, size, score, label, *features = columns.split(2, 2, 1, 1, *_parts(recipe))
    is_centred = recipe.head == "rtdetr_topk" or isinstance(recipe, ObbRecipe)
    corners = _to_corners(centre, size) if is_centred else centre.op("Concat", size, axis=1)
    label = label.op("Squeeze", [1]).op("Round").op("Cast", to=TensorProto.INT64)  # FP16 may give 1.999
    return corners.swap(), score.op("Squeeze", [1]), label, features[0] if features else None


def _parts(recipe: DetectionRecipe) -> list[int]:
    return [recipe.features] if recipe.features else []


def _to_corners(centre: Value, size: Value) -> Value:
    half = size / 2.0
    return (centre - half).op("Concat", centre + half, axis=1)


def _suppress(boxes: Value, score: Value, label: Value, classes: int, recipe: DetectionRecipe, limit: int) -> Value:  # noqa: PLR0913, PLR0917
    # Each class has its own row of scores, so boxes of different classes never suppress each other.
    membership = label.op("OneHot", [classes], [0.0, 1.0], axis=1)
    class_scores = membership * score.op("Unsqueeze", [1])
    selected = boxes.op("NonMaxSuppression", class_scores, [limit], [float(recipe.iou)], [float(recipe.floor)])
    one = numpy_helper.from_array(np.ones(1, np.float32))
    ones = selected.op("Shape", start=0, end=1).op("ConstantOfShape", value=one)
    zeros = score.op("Shape").op("ConstantOfShape")
    return score * zeros.op("ScatterND", selected.op("Gather", [0, 2], axis=1), ones)
