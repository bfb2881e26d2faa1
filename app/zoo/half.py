"""Let a network compute in FP16, for TensorRT, which since version 11 takes the precision from the graph."""

from itertools import pairwise

import onnx
from onnx import NodeProto, TensorProto, helper
from onnxruntime.transformers.float16 import convert_float_to_float16

# What is faster in FP16. What follows the last of these, such as the decoding of boxes, keeps its precision.
_HEAVY = {"Conv", "ConvTranspose", "Gemm", "MatMul"}


def to_half(network: onnx.ModelProto) -> onnx.ModelProto:
    """Return a network, with the same FP32 inputs and outputs, that computes in FP16 up to its last convolution or product."""
    old = onnx.ModelProto()
    old.CopyFrom(network)
    for number, node in enumerate(old.graph.node):
        node.name = f"{node.op_type}_{number}"
    count = len(old.graph.node)
    half: onnx.ModelProto = convert_float_to_float16(old, keep_io_types=True, node_block_list=_tail(old.graph))
    nodes, casts = list(half.graph.node[:count]), list(half.graph.node[count:])
    _join(casts)
    del half.graph.node[:]
    half.graph.node.extend(_sort(nodes, casts))
    return half


def _tail(graph: onnx.GraphProto) -> list[str]:
    reaching: set[str] = set()
    tail = []
    for node in reversed(graph.node):
        if node.op_type in _HEAVY or reaching.intersection(node.output):
            reaching.update(node.input)
        else:
            tail.append(node.name)
    return tail


def _join(casts: list[NodeProto]) -> None:
    # Between two nodes that keep their precision, the converter puts a cast to FP16, which rounds, and one back.
    exact = {cast.output[0]: cast.input[0] for cast in casts if cast.name.endswith("_cast_to_fp16_node")}
    for cast in casts:
        if cast.attribute[0].i == TensorProto.FLOAT:
            cast.input[0] = exact.get(cast.input[0], cast.input[0])


def _sort(nodes: list[NodeProto], casts: list[NodeProto]) -> list[NodeProto]:
    # Each cast, of which the converter makes some twice, comes behind what makes its input.
    waiting: dict[str, dict[str, NodeProto]] = {}
    for cast in casts:
        waiting.setdefault(cast.input[0], {})[cast.output[0]] = cast
    made = {name for node in (*nodes, *casts) for name in node.output}
    pending = [cast for name in [*waiting] if name not in made for cast in waiting.pop(name).values()] + nodes
    ordered = []
    pending.reverse()
    while pending:
        ordered.append(pending.pop())
        pending.extend(cast for name in ordered[-1].output for cast in waiting.pop(name, {}).values())
    return ordered


def keep_rounding(model: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model that, run without optimisations, rounds what it computes to FP16 on a CPU as well."""
    # ONNX Runtime computes there in FP32, and leaves out each cast to FP16 and back, unless two nodes take the value in FP16.
    model = onnx.shape_inference.infer_shapes(model)
    halves = {value.name for value in model.graph.value_info if value.type.tensor_type.elem_type == TensorProto.FLOAT16}
    nodes = []
    for node in model.graph.node:
        results = [name for name in node.output if name in halves]
        node.output[:] = [f"{name}/exact" if name in halves else name for name in node.output]
        nodes.append(node)
        for name in results:
            names = [f"{name}/exact", f"{name}/rounded", name]
            nodes += [helper.make_node("Identity", [taken], [given]) for taken, given in pairwise(names)]
    del model.graph.node[:], model.graph.value_info[:]
    model.graph.node.extend(nodes)
    return model
