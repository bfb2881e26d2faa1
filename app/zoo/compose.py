"""Compose a Triton model from a published network.

Graphs of standard operators before and after the network convert RGB bytes to its input, and its head to the results of the
task. The batch dimension is dynamic.
"""

from pathlib import Path

import numpy as np
import onnx
from onnx import compose, numpy_helper, version_converter

from app.zoo import efficientnet, heads
from app.zoo.graph import IR_VERSION, OPSET, parse
from app.zoo.registry import Recipe
from app.zoo.torch_weights import read_weights

_ARCHITECTURES = {"efficientnet_lite0": efficientnet.build_lite0}


def load_network(file: Path, recipe: Recipe) -> onnx.ModelProto:
    """Read a published network, or build it if its file contains only weights.

    Raises:
        ValueError: The weights cannot be read, or do not match the recipe's architecture.
    """
    return onnx.load(file) if recipe.architecture is None else _ARCHITECTURES[recipe.architecture](read_weights(file))


def compose_model(network: onnx.ModelProto, recipe: Recipe) -> onnx.ModelProto:
    """Build the checked model of a recipe around a network.

    The network has one FP32 input (1 or batch, 3, square, square) and one output in the format of `recipe.head`; the model has the
    input `image`, UINT8 (batch, square, square, 3), and the outputs of its graph in `heads`.

    Raises:
        ValueError: The network's input or output does not match the recipe.
    """
    after = heads.build(_head_sizes(network, recipe), recipe)
    network = _free_batch(network)
    image, head = network.graph.input[0].name, network.graph.output[0].name
    # Prefixes make the internal names of the graphs unique; the external names are the model's interface.
    before = compose.add_prefix(_preprocessing(recipe), "before/", rename_inputs=False)
    network = compose.add_prefix(network, "network/")
    model = compose.merge_models(before, network, io_map=[("before/pixels", f"network/{image}")])
    model = compose.merge_models(model, after, io_map=[(f"network/{head}", after.graph.input[0].name)])
    del model.opset_import[1:]  # one per merged graph, all identical
    model.producer_name = "nereid"
    onnx.checker.check_model(model, full_check=True)
    return model


def _preprocessing(recipe: Recipe) -> onnx.ModelProto:
    """Return the graph from bytes to the network's float input; steps without effect are omitted."""
    swap = recipe.channels == "BGR"
    reorder = """
    blue_first = Constant <value_ints = [2, 1, 0]> ()
    swapped = Gather <axis = 1> (planes, blue_first)"""
    shift = f"""
    mean = Constant <value_float = {recipe.mean}> ()
    centred = Sub (floats, mean)"""
    return parse(f"""
before (uint8[batch, {recipe.square}, {recipe.square}, 3] image) => (float[batch, 3, {recipe.square}, {recipe.square}] pixels) {{
    planes = Transpose <perm = [0, 3, 1, 2]> (image){reorder if swap else ""}
    floats = Cast <to = 1> ({"swapped" if swap else "planes"}){shift if recipe.mean else ""}
    divisor = Constant <value_float = {recipe.scale}> ()
    pixels = Div ({"centred" if recipe.mean else "floats"}, divisor)
}}""")


def _free_batch(network: onnx.ModelProto) -> onnx.ModelProto:
    """Make the batch dimension dynamic in a network that was exported for a batch of one."""
    if network.opset_import[0].version != OPSET:
        network = version_converter.convert_version(network, OPSET)
    for value in (*network.graph.input, *network.graph.output):
        value.type.tensor_type.shape.dim[0].dim_param = "batch"
    network.ir_version = IR_VERSION
    del network.graph.value_info[:]  # they contain the fixed batch size
    tensors = {tensor.name: tensor for tensor in network.graph.initializer}
    tensors |= {
        n.output[0]: n.attribute[0].t for n in network.graph.node if n.op_type == "Constant" and n.attribute[0].HasField("t")
    }
    for node in network.graph.node:
        if node.op_type == "Reshape" and (shape := tensors.get(node.input[1])) is not None:
            sizes = numpy_helper.to_array(shape)
            if sizes[0] == 1 and len(sizes) > 2:  # noqa: PLR2004 - (1, x) is also the shape of grids, which have no batch
                shape.CopyFrom(numpy_helper.from_array(np.array([0, *sizes[1:]], np.int64), shape.name))
    return network


def _head_sizes(network: onnx.ModelProto, recipe: Recipe) -> list[int]:
    """Return the dimensions of the network's output; check that it has one input and one output, and the recipe's input shape."""
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
    return sizes
