"""Build ONNX graphs from expressions; and the versions that all parts of a model use."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import ArrayLike, NDArray
from onnx import TensorProto, compose, helper, numpy_helper

# The oldest opset of a model: the newest in which reductions take their axes as attributes; supported by TensorRT 8.6 and later.
OPSET = 17
IR_VERSION = 8

FP32, INT32, DOUBLE = TensorProto.FLOAT, TensorProto.INT32, TensorProto.DOUBLE
_TYPES = {"FP32": FP32, "FP16": TensorProto.FLOAT16, "INT32": INT32, "INT64": TensorProto.INT64, "UINT8": TensorProto.UINT8}


def _binary(operator: str) -> "Callable[[Value, Value | ArrayLike], Value]":
    return lambda value, other: value.op(operator, other)


class Value:
    """A tensor of a graph. What is computed from it is added to the graph; numbers become constants, FP32 or INT64."""

    def __init__(self, graph: "Graph", name: str) -> None:
        self.graph, self.name = graph, name

    def op(self, operator: str, *operands: "Value | ArrayLike", **attributes: Any) -> "Value":  # noqa: ANN401 - as in onnx
        """Apply an operator to this tensor and other operands."""
        return self.graph.add(operator, [self, *operands], **attributes)[0]

    __add__ = _binary("Add")
    __sub__ = _binary("Sub")
    __mul__ = _binary("Mul")
    __truediv__ = _binary("Div")
    __floordiv__ = _binary("Div")
    __mod__ = _binary("Mod")
    __and__ = _binary("And")
    __gt__ = _binary("Greater")

    def split(self, *sizes: int) -> list["Value"]:
        """Split the second axis into parts of these sizes."""
        return self.graph.add("Split", [self, sizes], len(sizes), axis=1)

    def top(self, count: int, axis: int = 1) -> tuple["Value", "Value"]:
        """Return the largest elements along an axis, descending, and their positions."""
        values, positions = self.graph.add("TopK", [self, [count]], 2, axis=axis)
        return values, positions

    def swap(self) -> "Value":
        """Swap the second and the third axis."""
        return self.op("Transpose", perm=[0, 2, 1])

    def take(self, positions: "Value", axis: int = 1) -> "Value":
        """Return the elements at positions along an axis; both have the same shape otherwise."""
        return self.op("GatherElements", positions, axis=axis)

    def take_columns(self, positions: "Value", rows: int) -> "Value":
        """Return the columns at positions (batch, n) of (batch, rows, columns)."""
        return self.take(positions.op("Unsqueeze", [1]).op("Tile", [1, rows, 1]), axis=2)

    def convolve(self, name: str, kernel: NDArray[Any], bias: NDArray[Any], **attributes: Any) -> "Value":  # noqa: ANN401
        """Apply a convolution with weights of this name."""
        weights = [self.graph.weight(f"{name}/{part}", values) for part, values in (("kernel", kernel), ("bias", bias))]
        return self.op("Conv", *weights, **attributes)


class Graph:
    """A graph that is being built."""

    def __init__(self) -> None:
        self._nodes: list[onnx.NodeProto] = []
        self._weights: list[onnx.TensorProto] = []
        self._inputs: list[onnx.ValueInfoProto] = []

    def input(self, name: str, *shape: int | str, kind: str = "FP32") -> Value:
        """Add an input; names in its shape, which is without the batch, stand for dynamic dimensions."""
        self._inputs.append(helper.make_tensor_value_info(name, _TYPES[kind], ["batch", *shape]))
        return Value(self, name)

    def weight(self, name: str, values: NDArray[Any]) -> Value:
        """Add a weight, in FP32."""
        self._weights.append(numpy_helper.from_array(np.ascontiguousarray(values, np.float32), name))
        return Value(self, name)

    def constant(self, values: ArrayLike) -> Value:
        """Add numbers as a constant: those of Python as FP32 or INT64, arrays as they are."""
        array = np.asarray(values)
        if array.dtype == np.float64 and not isinstance(values, np.ndarray | np.generic):
            array = array.astype(np.float32)
        return self.add("Constant", [], value=numpy_helper.from_array(array))[0]

    def add(self, operator: str, operands: Sequence[Value | ArrayLike], results: int = 1, **attributes: Any) -> list[Value]:  # noqa: ANN401
        """Add an operator with so many results."""
        inputs = [operand if isinstance(operand, Value) else self.constant(operand) for operand in operands]
        outputs = [f"{operator.lower()}_{len(self._nodes)}_{index}" for index in range(results)]
        self._nodes.append(helper.make_node(operator, [value.name for value in inputs], outputs, **attributes))
        return [Value(self, name) for name in outputs]

    def build(self, name: str, outputs: "Mapping[str, Output]") -> onnx.ModelProto:
        """Return the model with these results of operators as outputs."""
        names = {value.name: output for output, (value, _, _) in outputs.items()}
        for node in self._nodes:
            for used in (node.input, node.output):
                used[:] = [names.get(each, each) for each in used]
        infos = [
            helper.make_tensor_value_info(output, _TYPES[kind], ["batch", *(None if side == -1 else side for side in shape)])
            for output, (_, kind, shape) in outputs.items()
        ]
        graph = helper.make_graph(self._nodes, name, self._inputs, infos, self._weights)
        return helper.make_model(graph, ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)])


Output = tuple[Value, str, Sequence[int | str]]
"""An output: its value, its type as in `_TYPES`, and its shape without the batch; -1 if dynamic."""


def join(first: onnx.ModelProto, second: onnx.ModelProto) -> onnx.ModelProto:
    """Return a model in which the outputs of one are the inputs of another, in their order."""
    pairs = zip(first.graph.output, second.graph.input, strict=True)
    return compose.merge_models(first, second, io_map=[(output.name, taken.name) for output, taken in pairs])
