"""The graphs from the head of a network to the results of its task."""

from collections.abc import Sequence

import onnx
from onnx import compose, numpy_helper

from app.detection.nms import MAX_CANDIDATES, MAX_DETECTIONS, MIN_SCORE
from app.model.anchors import anchor_grid, count_anchors
from app.zoo.graph import parse
from app.zoo.registry import DetectionRecipe, Recipe


def build(sizes: Sequence[int], recipe: Recipe) -> onnx.ModelProto:
    """Build the graph that follows a network, with its head as the input. The sizes are those of the head; 0 for dynamic ones.

    Returns:
        For a detector, a graph with the outputs `num_dets` INT32 (batch, 1), `det_boxes` FP32 (batch, 300, 4) x1 y1 x2 y2 in pixels
        of the square, `det_scores` FP32 (batch, 300) descending, `det_classes` INT32 (batch, 300). Rows past `num_dets` are zero.
        For a classifier, one with the output `probabilities`, FP32 (batch, classes); each row sums to 1.

    Raises:
        ValueError: The output is not the recipe's head.
    """
    if isinstance(recipe, DetectionRecipe):
        return _select_boxes(sizes, recipe)
    if len(sizes) != 2 or sizes[1] < 2:  # noqa: PLR2004 - the batch, and at least two classes
        raise ValueError(f"the output {tuple(sizes)} is not a number for each class")
    operator = "Softmax <axis = 1>" if recipe.head == "logits" else "Identity"
    graph = _CLASSIFY.format(classes=sizes[1], operator=operator)
    return compose.add_prefix(parse(graph), "classify/", rename_outputs=False)


def _select_boxes(sizes: Sequence[int], recipe: DetectionRecipe) -> onnx.ModelProto:
    anchors, classes = _head_size(sizes, recipe)
    decode = parse(_DECODE[recipe.head].format(classes=classes))
    if recipe.head == "yolox":
        for name, values in zip(("grid", "strides"), anchor_grid((recipe.square, recipe.square)), strict=True):
            decode.graph.initializer.append(numpy_helper.from_array(values.T[None], name))
    select = parse(
        _SELECT.format(
            candidates=min(MAX_CANDIDATES, anchors),
            detections=MAX_DETECTIONS,
            classes=classes,
            iou=recipe.iou,
            floor=MIN_SCORE,
        )
    )
    decode = compose.add_prefix(decode, "decode/")
    select = compose.add_prefix(select, "select/", rename_outputs=False)
    links = [("decode/corners", "select/corners"), ("decode/scores", "select/scores")]
    return compose.merge_models(decode, select, io_map=links)


def _head_size(sizes: Sequence[int], recipe: DetectionRecipe) -> tuple[int, int]:
    """Return the numbers of anchors and classes of a head."""
    anchors = count_anchors((recipe.square, recipe.square))
    channels, rows = (sizes[1:] if recipe.head == "yolo" else sizes[:0:-1]) if len(sizes) == 3 else (0, 0)  # noqa: PLR2004
    classes = channels - (4 if recipe.head == "yolo" else 5)
    if classes < 1 or rows not in (0, anchors):
        raise ValueError(f"the output {tuple(sizes)} is not a {recipe.head} head of {anchors} anchors")
    return anchors, classes


_CORNERS = """
    two = Constant <value_float = 2.0> ()
    half = Div (size, two)
    top_left = Sub (centre, half)
    bottom_right = Add (centre, half)
    corners = Concat <axis = 1> (top_left, bottom_right)
}}"""

_DECODE = {
    "yolo": """
decode (float[batch, channels, anchors] head)
    => (float[batch, 4, anchors] corners, float[batch, {classes}, anchors] scores) {{
    parts = Constant <value_ints = [2, 2, {classes}]> ()
    centre, size, scores = Split <axis = 1> (head, parts)"""
    + _CORNERS,
    "yolox": """
decode (float[batch, anchors, channels] head)
    => (float[batch, 4, anchors] corners, float[batch, {classes}, anchors] scores) {{
    rows = Transpose <perm = [0, 2, 1]> (head)
    parts = Constant <value_ints = [2, 2, 1, {classes}]> ()
    offset, log_size, objectness, likelihood = Split <axis = 1> (rows, parts)
    cell = Add (offset, grid)
    centre = Mul (cell, strides)
    cells = Exp (log_size)
    size = Mul (cells, strides)
    scores = Mul (objectness, likelihood)"""
    + _CORNERS,
}

# An anchor counts only for its best class, as in the detectors' own post-processing. The number of candidates is limited before the
# NMS to bound its cost. Each class has its own row of scores, so boxes of different classes never suppress each other.
_SELECT = """
select (float[batch, 4, anchors] corners, float[batch, {classes}, anchors] scores)
    => (int32[batch, 1] num_dets, float[batch, {detections}, 4] det_boxes,
        float[batch, {detections}] det_scores, int32[batch, {detections}] det_classes) {{
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    four_rows = Constant <value_ints = [1, 4, 1]> ()
    four_columns = Constant <value_ints = [1, 1, 4]> ()

    best_score = ReduceMax <axes = [1], keepdims = 0> (scores)
    best_class = ArgMax <axis = 1, keepdims = 0> (scores)
    candidates = Constant <value_ints = [{candidates}]> ()
    score, anchor = TopK <axis = 1> (best_score, candidates)
    label = GatherElements <axis = 1> (best_class, anchor)
    anchor_row = Unsqueeze (anchor, one)
    anchor_rows = Tile (anchor_row, four_rows)
    columns = GatherElements <axis = 2> (corners, anchor_rows)
    boxes = Transpose <perm = [0, 2, 1]> (columns)

    depth = Constant <value_ints = [{classes}]> ()
    off_on = Constant <value_floats = [0.0, 1.0]> ()
    membership = OneHot <axis = 1> (label, depth, off_on)
    score_row = Unsqueeze (score, one)
    class_scores = Mul (membership, score_row)
    limit = Constant <value_ints = [{detections}]> ()
    overlap = Constant <value_floats = [{iou}]> ()
    floor = Constant <value_floats = [{floor}]> ()
    selected = NonMaxSuppression (boxes, class_scores, limit, overlap, floor)

    image_and_box = Constant <value_ints = [0, 2]> ()
    indices = Gather <axis = 1> (selected, image_and_box)
    shape = Shape (score)
    zeros = ConstantOfShape <value = float[1] {{0.0}}> (shape)
    selected_count = Shape <start = 0, end = 1> (selected)
    ones = ConstantOfShape <value = float[1] {{1.0}}> (selected_count)
    mask = ScatterND (zeros, indices, ones)
    kept_score = Mul (score, mask)

    det_scores, order = TopK <axis = 1> (kept_score, limit)
    zero = Constant <value_float = 0.0> ()
    is_valid = Greater (det_scores, zero)
    valid = Cast <to = 6> (is_valid)
    num_dets = ReduceSum <keepdims = 1> (valid, one)
    ordered_label = GatherElements <axis = 1> (label, order)
    label32 = Cast <to = 6> (ordered_label)
    det_classes = Mul (label32, valid)
    order_column = Unsqueeze (order, two)
    order_columns = Tile (order_column, four_columns)
    ordered_boxes = GatherElements <axis = 1> (boxes, order_columns)
    valid_float = Cast <to = 1> (is_valid)
    valid_column = Unsqueeze (valid_float, two)
    det_boxes = Mul (ordered_boxes, valid_column)
}}"""

_CLASSIFY = """
classify (float[batch, {classes}] head) => (float[batch, {classes}] probabilities) {{
    probabilities = {operator} (head)
}}"""
