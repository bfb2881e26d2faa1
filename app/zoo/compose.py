"""Compose a Triton model, image in and detections out, from a published network.

The graphs of standard operators before and after the network turn RGB bytes into what it was trained on, and its head
into at most `MAX_DETECTIONS` rows. The batch dimension stays free.
"""

import numpy as np
import onnx
from onnx import compose, numpy_helper, parser, version_converter

from app.detection.nms import MAX_CANDIDATES, MAX_DETECTIONS, MIN_SCORE
from app.model.anchors import anchor_grid, count_anchors
from app.zoo.registry import Recipe

# The newest opset whose reductions still take their axes as attributes; TensorRT 8.6 and later read it.
OPSET = 17
IR_VERSION = 8


def compose_model(network: onnx.ModelProto, recipe: Recipe) -> onnx.ModelProto:
    """Build the model of `recipe` around `network`.

    Args:
        network: One FP32 input (1 or batch, 3, square, square), one output as `recipe.head` says.
        recipe: How images go in and boxes come out.

    Returns:
        A checked model: `image` UINT8 (batch, square, square, 3) in; `num_dets` INT32 (batch, 1),
        `det_boxes` FP32 (batch, 300, 4) x1 y1 x2 y2 in pixels of the square, `det_scores` FP32
        (batch, 300) descending, `det_classes` INT32 (batch, 300) out. Rows past `num_dets` are zero.

    Raises:
        ValueError: The network's input or output is not what the recipe says.
    """
    anchors, classes = _head_size(network, recipe)
    network = _free_batch(network)
    before = _graph(_PREPROCESS[recipe.channels].format(side=recipe.square, scale=recipe.scale))
    decode = _graph(_DECODE[recipe.head].format(classes=classes))
    if recipe.head == "yolox":
        for name, values in zip(("grid", "strides"), anchor_grid((recipe.square, recipe.square)), strict=True):
            decode.graph.initializer.append(numpy_helper.from_array(values.T[None], name))
    select = _graph(
        _SELECT.format(
            candidates=min(MAX_CANDIDATES, anchors),
            detections=MAX_DETECTIONS,
            classes=classes,
            iou=recipe.iou,
            floor=MIN_SCORE,
        )
    )
    image, head = network.graph.input[0].name, network.graph.output[0].name
    # Prefixes keep the inner names of the four graphs apart; the outer names are the model's interface.
    before = compose.add_prefix(before, "before/", rename_inputs=False)
    network = compose.add_prefix(network, "network/")
    decode = compose.add_prefix(decode, "decode/")
    select = compose.add_prefix(select, "select/", rename_outputs=False)
    model = compose.merge_models(before, network, io_map=[("before/pixels", f"network/{image}")])
    model = compose.merge_models(model, decode, io_map=[(f"network/{head}", "decode/head")])
    links = [("decode/corners", "select/corners"), ("decode/scores", "select/scores")]
    model = compose.merge_models(model, select, io_map=links)
    del model.opset_import[1:]  # one for each merged graph, all the same
    model.producer_name = "nereid"
    onnx.checker.check_model(model, full_check=True)
    return model


def _graph(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}]>\n{text}')


def _free_batch(network: onnx.ModelProto) -> onnx.ModelProto:
    """Make the batch dimension variable in a network that was exported for a batch of one."""
    if network.opset_import[0].version != OPSET:
        network = version_converter.convert_version(network, OPSET)
    for value in (*network.graph.input, *network.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    network.ir_version = IR_VERSION
    del network.graph.value_info[:]  # they repeat the fixed batch
    tensors = {tensor.name: tensor for tensor in network.graph.initializer}
    tensors |= {
        n.output[0]: n.attribute[0].t for n in network.graph.node if n.op_type == "Constant" and n.attribute[0].HasField("t")
    }
    for node in network.graph.node:
        if node.op_type == "Reshape" and (shape := tensors.get(node.input[1])) is not None:
            sizes = numpy_helper.to_array(shape)
            if sizes[0] == 1 and len(sizes) > 2:  # noqa: PLR2004 - (1, x) also lays out grids, which have no batch
                shape.CopyFrom(numpy_helper.from_array(np.array([0, *sizes[1:]], np.int64), shape.name))
    return network


def _head_size(network: onnx.ModelProto, recipe: Recipe) -> tuple[int, int]:
    """Return the anchors and classes of the network's head; check that its tensors are what the recipe says."""
    graph = network.graph
    if len(graph.input) != 1 or len(graph.output) != 1:
        raise ValueError(f"expected one input and one output, found {len(graph.input)} and {len(graph.output)}")
    image, head = (value.type.tensor_type for value in (graph.input[0], graph.output[0]))
    planes, sizes = ([dim.dim_value for dim in tensor.shape.dim] for tensor in (image, head))
    expected = (3, recipe.square, recipe.square)
    is_fp32 = image.elem_type == onnx.TensorProto.FLOAT
    if not is_fp32 or len(planes) != 4 or any(size not in (0, due) for size, due in zip(planes[1:], expected, strict=True)):  # noqa: PLR2004
        raise ValueError(f"the input {tuple(planes)} is not FP32 (batch, {', '.join(map(str, expected))})")
    for dim, size in zip(image.shape.dim[1:], expected, strict=True):
        dim.dim_value = size
    anchors = count_anchors((recipe.square, recipe.square))
    channels, rows = (sizes[1:] if recipe.head == "yolo" else sizes[:0:-1]) if len(sizes) == 3 else (0, 0)  # noqa: PLR2004
    classes = channels - (4 if recipe.head == "yolo" else 5)
    if classes < 1 or rows not in (0, anchors):
        raise ValueError(f"the output {tuple(sizes)} is not a {recipe.head} head of {anchors} anchors")
    return anchors, classes


_PREPROCESS = {
    "RGB": """
before (uint8[batch, {side}, {side}, 3] image) => (float[batch, 3, {side}, {side}] pixels) {{
    planes = Transpose <perm = [0, 3, 1, 2]> (image)
    floats = Cast <to = 1> (planes)
    divisor = Constant <value_float = {scale}> ()
    pixels = Div (floats, divisor)
}}""",
    "BGR": """
before (uint8[batch, {side}, {side}, 3] image) => (float[batch, 3, {side}, {side}] pixels) {{
    planes = Transpose <perm = [0, 3, 1, 2]> (image)
    blue_first = Constant <value_ints = [2, 1, 0]> ()
    swapped = Gather <axis = 1> (planes, blue_first)
    floats = Cast <to = 1> (swapped)
    divisor = Constant <value_float = {scale}> ()
    pixels = Div (floats, divisor)
}}""",
}

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

# An anchor stands for its best class only, as in the detectors' own post-processing. Candidates are selected before
# the NMS to limit its cost, and each class has its own row of scores so that boxes of different classes never suppress
# each other.
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
