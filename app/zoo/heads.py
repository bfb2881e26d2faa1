"""The graphs from the head of a network to the results of its task."""

from collections.abc import Sequence

import numpy as np
import onnx
from onnx import compose, numpy_helper

from app.detection.nms import MAX_CANDIDATES, MAX_DETECTIONS
from app.model.anchors import anchor_grid, count_anchors
from app.zoo import oriented
from app.zoo.graph import parse
from app.zoo.recipe import (
    FRACTIONS,
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
    """Build the graph that follows a network, with its outputs as the inputs, in the order of `TENSORS`, and prototypes last.

    Args:
        shapes: Shapes of the outputs, without the batch; 0 for dynamic dimensions.
        recipe: Recipe of the model.
        classes: Number of classes, where the shapes allow two: `rfdetr`.

    Returns:
        For a detector, a graph with the outputs `num_dets` INT32 (batch, 1), `det_boxes` FP32 (batch, 300, 4) x1 y1 x2 y2 in pixels
        of the input, `det_scores` FP32 (batch, 300) descending, `det_classes` INT32 (batch, 300). Rows past `num_dets` are zero.
        For segmentation also `det_masks` FP32 (batch, 300, coefficients), `prototypes` FP16 (batch, coefficients, height, width);
        for poses `det_keypoints` FP32 (batch, 300, keypoints, 2 or 3), as in `PoseRecipe`;
        for oriented boxes `det_angles` FP32 (batch, 300) in radians, and `det_boxes` are those before the rotation.
        For a classifier, one with the output `probabilities`, FP32 (batch, classes); each row sums to 1.
        For other tasks, one with the `outputs` of the recipe.

    Raises:
        ValueError: The outputs are not the recipe's head.
    """
    if isinstance(recipe, DetectionRecipe):
        return _find(shapes, recipe, classes)
    if isinstance(recipe, ClassificationRecipe):
        if len(shapes[0]) != 1 or shapes[0][0] < 2:  # noqa: PLR2004 - at least two classes
            raise ValueError(f"the output {_text(shapes)} is not a number for each class")
        operator = "Softmax <axis = 1>" if recipe.head == "logits" else "Identity"
        graph = parse(_CLASSIFY.format(classes=shapes[0][0], operator=operator))
    elif isinstance(recipe, EmbeddingRecipe):
        if [*shapes[0]] != [recipe.dimensions]:
            raise ValueError(f"the output {_text(shapes)} is not a vector of {recipe.dimensions} values")
        graph = parse(_DESCRIBE.format(dimensions=recipe.dimensions))
    else:
        graph = parse(_MAP if isinstance(recipe, TextDetectionRecipe) else _READ)
    return compose.add_prefix(graph, "after/", rename_outputs=False)


def _find(shapes: Sequence[Sequence[int]], recipe: DetectionRecipe, classes: int | None) -> onnx.ModelProto:
    head, anchors, features = recipe.head, count_anchors(recipe.size), recipe.features
    is_raw, is_obb = head in RAW_HEADS, isinstance(recipe, ObbRecipe)
    found = measure(shapes[:1] if features else shapes, head, recipe.size, features)
    if found is None:
        raise ValueError(f"the output {_text(shapes)} is not a {head} head for {recipe.size[0]} x {recipe.size[1]} pixels")
    rows, count = found[0] or anchors, found[1]
    if head == "rfdetr" and classes == count + 1:  # no column is unused
        count += 1
    # Each pair of oriented candidates is compared.
    candidates = min(MAX_CANDIDATES if is_obb else _MAX_PAIRS, rows * count) if recipe.multi_label else min(MAX_CANDIDATES, rows)
    is_fraction = head in FRACTIONS or (head in PIXELS and recipe.box_units == "normalized")
    detections = min(MAX_DETECTIONS, rows * count if head == "rfdetr" else candidates)
    pick = (_PICK_PAIRS if recipe.multi_label else _PICK_ANCHORS) + _PLACE + (oriented.SUPPRESS if is_obb else _SUPPRESS)
    text = _FIND + _DECODE["rtdetr_topk" if is_obb and not is_raw else head] + (pick if is_raw else _KEEP)
    text += (_SCALE if is_fraction else "") + _SORT + (_PAD if detections < MAX_DETECTIONS else "")
    if features:
        text += (_CHOOSE if is_raw else "") + _FEATURES + (_PAD_FEATURES if detections < MAX_DETECTIONS else "") + _SHAPE_FEATURES
    planes = ""
    if isinstance(recipe, SegmentationRecipe):
        planes = ", float[batch, count, height, width] planes"
        text += _PROTOTYPES
    outputs = "".join(f", {_TYPES[kind]}{['batch', *shape]} {name}" for name, (kind, shape) in recipe.outputs.items())
    graph = parse(
        (text + "}}").format(
            inputs=_INPUTS.get(head, "float[batch, rows, channels] head") + planes,
            more_outputs=outputs.replace("'", ""),
            feature_output=next(iter(recipe.outputs), ""),
            feature_shape=[0, *next((shape for _, shape in recipe.outputs.values()), ())],
            feature_part=f", {features}" if features else "",
            feature_rows=", features" if features else "",
            features=features,
            chosen="chosen" if is_raw else "order",
            epsilon=oriented.EPSILON,
            four_distances=4 * oriented.max_distance(recipe.iou),
            anchors=rows,
            classes=count,
            candidates=candidates,
            detections=detections,
            rows=MAX_DETECTIONS,
            missing=MAX_DETECTIONS - detections,
            found="found" if detections < MAX_DETECTIONS else "det",
            iou=float(recipe.iou),
            floor=float(recipe.floor),
            sides=[float(side) for side in recipe.size * 2],
            boxes="scaled_boxes" if is_fraction else "boxes",
        )
    )
    if head == "yolox":
        for name, values in zip(("grid", "strides"), anchor_grid(recipe.size), strict=True):
            graph.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(values.T[None]), name))
    return compose.add_prefix(graph, "after/", rename_outputs=False)


def _text(shapes: Sequence[Sequence[int]]) -> str:
    return " and ".join(str(("batch", *shape)).replace("'", "") for shape in shapes)


_TYPES = {"FP32": "float", "FP16": "float16"}
_INPUTS = {
    "yolo": "float[batch, channels, rows] columns",
    "rfdetr": "float[batch, rows, 4] dets, float[batch, rows, channels] labels",
    "dfine": "int64[batch, rows] label, float[batch, rows, 4] boxes, float[batch, rows] score",
}

_FIND = """
find ({inputs})
    => (int32[batch, 1] num_dets, float[batch, {rows}, 4] det_boxes,
        float[batch, {rows}] det_scores, int32[batch, {rows}] det_classes{more_outputs}) {{
    zero = Constant <value_float = 0.0> ()
    one = Constant <value_ints = [1]> ()
    two = Constant <value_ints = [2]> ()
    four_columns = Constant <value_ints = [1, 1, 4]> ()
    limit = Constant <value_ints = [{detections}]> ()"""

_TRANSPOSE = """
    columns = Transpose <perm = [0, 2, 1]> (head)"""

_SPLIT = """
    parts = Constant <value_ints = [2, 2, {classes}{feature_part}]> ()
    centre, size, scores{feature_rows} = Split <axis = 1> (columns, parts)"""

_CORNERS = """
    divisor = Constant <value_float = 2.0> ()
    half = Div (size, divisor)
    top_left = Sub (centre, half)
    bottom_right = Add (centre, half)
    corners = Concat <axis = 1> (top_left, bottom_right)"""

_ROWS = """
    boxes = Transpose <perm = [0, 2, 1]> (corners)"""

_ONE_CLASS = """
    score = Squeeze (score_row, one)
    class = Squeeze (class_row, one)
    label = Cast <to = 7> (class)"""

# Raw heads become `corners` (batch, 4, rows) and `scores` (batch, classes, rows); the others `boxes` (batch, rows, 4), `score` and
# `label` (batch, rows); both also `features` (batch, features, rows). A row of several scores counts only for its best class, as in
# the detectors' own post-processing, except that of `rfdetr`, and of raw heads if the recipe says `multi_label`.
_DECODE = {
    "yolo": _SPLIT + _CORNERS,
    "yolov5": _TRANSPOSE
    + """
    parts = Constant <value_ints = [2, 2, 1, {classes}]> ()
    centre, size, objectness, likelihood = Split <axis = 1> (columns, parts)
    scores = Mul (objectness, likelihood)"""
    + _CORNERS,
    "yolox": _TRANSPOSE
    + """
    parts = Constant <value_ints = [2, 2, 1, {classes}]> ()
    offset, log_size, objectness, likelihood = Split <axis = 1> (columns, parts)
    cell = Add (offset, grid)
    centre = Mul (cell, strides)
    cells = Exp (log_size)
    size = Mul (cells, strides)
    scores = Mul (objectness, likelihood)"""
    + _CORNERS,
    "end_to_end": _TRANSPOSE
    + """
    parts = Constant <value_ints = [4, 1, 1{feature_part}]> ()
    corners, score_row, class_row{feature_rows} = Split <axis = 1> (columns, parts)"""
    + _ONE_CLASS
    + _ROWS,
    "rtdetr": _TRANSPOSE
    + _SPLIT
    + _CORNERS
    + _ROWS
    + """
    score = ReduceMax <axes = [1], keepdims = 0> (scores)
    label = ArgMax <axis = 1, keepdims = 0> (scores)""",
    "rtdetr_topk": _TRANSPOSE
    + """
    parts = Constant <value_ints = [2, 2, 1, 1{feature_part}]> ()
    centre, size, score_row, class_row{feature_rows} = Split <axis = 1> (columns, parts)"""
    + _ONE_CLASS
    + _CORNERS
    + _ROWS,
    "rfdetr": """
    columns = Transpose <perm = [0, 2, 1]> (dets)
    parts = Constant <value_ints = [2, 2]> ()
    centre, size = Split <axis = 1> (columns, parts)"""
    + _CORNERS
    + """
    first = Constant <value_ints = [0]> ()
    classes = Constant <value_ints = [{classes}]> ()
    used = Slice (labels, first, classes, two)
    one_row = Constant <value_ints = [0, -1]> ()
    logits = Reshape (used, one_row)
    logit, position = TopK <axis = 1> (logits, limit)
    score = Sigmoid (logit)
    label = Mod (position, classes)
    query = Div (position, classes)
    query_column = Unsqueeze (query, two)
    query_columns = Tile (query_column, four_columns)
    query_boxes = Transpose <perm = [0, 2, 1]> (corners)
    boxes = GatherElements <axis = 1> (query_boxes, query_columns)""",
    "dfine": "",
}

# The number of candidates is limited before the NMS to bound its cost.
_PICK_ANCHORS = """
    best_score = ReduceMax <axes = [1], keepdims = 0> (scores)
    best_class = ArgMax <axis = 1, keepdims = 0> (scores)
    four_rows = Constant <value_ints = [1, 4, 1]> ()
    candidates = Constant <value_ints = [{candidates}]> ()
    score, anchor = TopK <axis = 1> (best_score, candidates)
    label = GatherElements <axis = 1> (best_class, anchor)"""

_PICK_PAIRS = """
    four_rows = Constant <value_ints = [1, 4, 1]> ()
    candidates = Constant <value_ints = [{candidates}]> ()
    one_row = Constant <value_ints = [0, -1]> ()
    pair_scores = Reshape (scores, one_row)
    score, pair = TopK <axis = 1> (pair_scores, candidates)
    anchors = Constant <value_ints = [{anchors}]> ()
    label = Div (pair, anchors)
    anchor = Mod (pair, anchors)"""

_PLACE = """
    anchor_row = Unsqueeze (anchor, one)
    anchor_rows = Tile (anchor_row, four_rows)
    corner_columns = GatherElements <axis = 2> (corners, anchor_rows)
    boxes = Transpose <perm = [0, 2, 1]> (corner_columns)"""

# Each class has its own row of scores, so boxes of different classes never suppress each other.
_SUPPRESS = """
    depth = Constant <value_ints = [{classes}]> ()
    off_on = Constant <value_floats = [0.0, 1.0]> ()
    membership = OneHot <axis = 1> (label, depth, off_on)
    score_row = Unsqueeze (score, one)
    class_scores = Mul (membership, score_row)
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
    kept_score = Mul (score, mask)"""

_KEEP = """
    floor = Constant <value_float = {floor}> ()
    is_kept = Greater (score, floor)
    kept_score = Where (is_kept, score, zero)"""

_SCALE = """
    sides = Constant <value_floats = {sides}> ()
    scaled_boxes = Mul (boxes, sides)"""

_SORT = """
    {found}_scores, order = TopK <axis = 1> (kept_score, limit)
    is_valid = Greater ({found}_scores, zero)
    valid = Cast <to = 6> (is_valid)
    num_dets = ReduceSum <keepdims = 1> (valid, one)
    ordered_label = GatherElements <axis = 1> (label, order)
    label32 = Cast <to = 6> (ordered_label)
    {found}_classes = Mul (label32, valid)
    order_column = Unsqueeze (order, two)
    order_columns = Tile (order_column, four_columns)
    ordered_boxes = GatherElements <axis = 1> ({boxes}, order_columns)
    valid_float = Cast <to = 1> (is_valid)
    valid_column = Unsqueeze (valid_float, two)
    {found}_boxes = Mul (ordered_boxes, valid_column)
"""

_CHOOSE = """
    chosen = GatherElements <axis = 1> (anchor, order)"""

_FEATURES = """
    chosen_row = Unsqueeze ({chosen}, one)
    feature_counts = Constant <value_ints = [1, {features}, 1]> ()
    chosen_rows = Tile (chosen_row, feature_counts)
    feature_columns = GatherElements <axis = 2> (features, chosen_rows)
    ordered_features = Transpose <perm = [0, 2, 1]> (feature_columns)
    {found}_features = Mul (ordered_features, valid_column)
"""

# Triton demands the number of rows that the config states, also of a network that gives fewer.
_PAD = """
    missing = Constant <value_ints = [0, 0, 0, {missing}]> ()
    missing_boxes = Constant <value_ints = [0, 0, 0, 0, {missing}, 0]> ()
    det_scores = Pad (found_scores, missing)
    det_classes = Pad (found_classes, missing)
    det_boxes = Pad (found_boxes, missing_boxes)
"""

_PAD_FEATURES = """
    det_features = Pad (found_features, missing_boxes)
"""

_SHAPE_FEATURES = """
    feature_shape = Constant <value_ints = {feature_shape}> ()
    {feature_output} = Reshape (det_features, feature_shape)
"""

_PROTOTYPES = """
    prototypes = Cast <to = 10> (planes)
"""

_CLASSIFY = """
classify (float[batch, {classes}] head) => (float[batch, {classes}] probabilities) {{
    probabilities = {operator} (head)
}}"""

_DESCRIBE = """
describe (float[batch, {dimensions}] head) => (float[batch, {dimensions}] embedding) {{
    embedding = Identity (head)
}}"""

_MAP = """
map (float[batch, 1, height, width] head) => (uint8[batch, height, width] text_map) {
    one = Constant <value_ints = [1]> ()
    most = Constant <value_float = 255.0> ()
    probability = Squeeze (head, one)
    scaled = Mul (probability, most)
    rounded = Round (scaled)
    text_map = Cast <to = 2> (rounded)
}"""

_READ = """
read (float[batch, steps, characters] head) => (int32[batch, steps] classes, float[batch, steps] scores) {
    scores = ReduceMax <axes = [2], keepdims = 0> (head)
    best = ArgMax <axis = 2, keepdims = 0> (head)
    classes = Cast <to = 6> (best)
}"""
