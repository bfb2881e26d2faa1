"""EfficientNet-Lite0 (Tan and Le, 2019), built from its weights.

It consists of inverted residual blocks as in MobileNetV2: a pointwise convolution to more channels, a depthwise convolution, and a
pointwise convolution to fewer channels. Unlike EfficientNet-B0, it has ReLU6 and no squeeze-and-excitation.
"""

from pathlib import Path
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import TensorProto, helper, numpy_helper

from app.zoo.graph import IR_VERSION, OPSET
from app.zoo.torch_weights import Weights, read_weights

_SQUARE = 224
_BLOCKS = 16
_HALVING = (1, 3, 5, 11)
"""Blocks with stride 2, which the first convolution also has."""
_EPSILON = 1e-3
"""Epsilon of the batch normalization."""


def load(file: Path, *, has_classes: bool = True) -> onnx.ModelProto:
    """Build the network from a file of PyTorch; the arguments and errors are otherwise those of `build_lite0`."""
    return build_lite0(read_weights(file), has_classes=has_classes)


def build_lite0(weights: Weights, *, has_classes: bool = True) -> onnx.ModelProto:
    """Build the network, with batch normalization folded into the convolutions.

    The weights have the names in EfficientNet implementations for PyTorch. The model has the input `images` FP32 (batch, 3, 224,
    224) and the output `logits` FP32 (batch, classes), or without the classes `features` FP32 (batch, 1280).

    Raises:
        ValueError: A weight is missing.
    """
    try:
        layers = _Layers(weights)
        x = layers.convolve("images", "_conv_stem", "_bn0", stride=2)
        for index in range(_BLOCKS):
            x = layers.transform(x, f"_blocks.{index}.", stride=2 if index in _HALVING else 1)
        x = layers.convolve(x, "_conv_head", "_bn1")
        output, count = layers.pool(x), len(weights["_conv_head.weight"])
        if has_classes:
            output, count = layers.classify(output), len(weights["_fc.bias"])
    except KeyError as error:
        raise ValueError(f"{error} is missing among the weights") from error
    image = helper.make_tensor_value_info("images", TensorProto.FLOAT, ["batch", 3, _SQUARE, _SQUARE])
    result = helper.make_tensor_value_info(output, TensorProto.FLOAT, ["batch", count])
    graph = helper.make_graph(layers.nodes, "efficientnet_lite0", [image], [result], layers.tensors)
    return helper.make_model(graph, ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)])


class _Layers:
    """Adds layers to a graph; each method returns the name of the output."""

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = [_tensor("zero", np.float32(0)), _tensor("six", np.float32(6))]

    def transform(self, x: str, block: str, *, stride: int) -> str:
        """Add a block, with a shortcut if input and output have the same shape."""
        expand, project = f"{block}_expand_conv", f"{block}_project_conv"
        has_expansion = f"{expand}.weight" in self._weights
        wide = self.convolve(x, expand, f"{block}_bn0") if has_expansion else x
        deep = self.convolve(wide, f"{block}_depthwise_conv", f"{block}_bn1", stride=stride)
        result = self.convolve(deep, project, f"{block}_bn2", is_linear=True)
        channels = self._weights[f"{expand if has_expansion else project}.weight"].shape[1]
        is_same_shape = stride == 1 and channels == len(self._weights[f"{project}.weight"])
        return self._add("Add", [result, x], f"{block}sum") if is_same_shape else result

    def convolve(self, x: str, name: str, norm: str, *, stride: int = 1, is_linear: bool = False) -> str:
        """Add a convolution, its batch normalization, and ReLU6 unless it is linear."""
        kernel = self._weights[f"{name}.weight"]
        factor = self._weights[f"{norm}.weight"] / np.sqrt(self._weights[f"{norm}.running_var"] + _EPSILON)
        bias = self._weights[f"{norm}.bias"] - self._weights[f"{norm}.running_mean"] * factor
        self.tensors += [_tensor(f"{name}.kernel", kernel * factor[:, None, None, None]), _tensor(f"{name}.bias", bias)]
        # TensorFlow, in which it was trained, puts odd padding at the bottom and right.
        groups = len(kernel) if kernel.shape[1] == 1 else 1
        inputs = [x, f"{name}.kernel", f"{name}.bias"]
        self._add("Conv", inputs, name, strides=[stride, stride], group=groups, auto_pad="SAME_UPPER")
        return name if is_linear else self._add("Clip", [name, "zero", "six"], f"{name}.relu6")

    def pool(self, x: str) -> str:
        """Add global average pooling."""
        return self._add("Flatten", [self._add("GlobalAveragePool", [x], "pooled")], "features")

    def classify(self, features: str) -> str:
        """Add the linear layer."""
        self.tensors += [_tensor(name, self._weights[name]) for name in ("_fc.weight", "_fc.bias")]
        return self._add("Gemm", [features, "_fc.weight", "_fc.bias"], "logits", transB=1)

    def _add(self, operator: str, inputs: list[str], output: str, **attributes: Any) -> str:  # noqa: ANN401 - as in onnx
        self.nodes.append(helper.make_node(operator, inputs, [output], **attributes))
        return output


def _tensor(name: str, values: NDArray[Any] | np.float32) -> onnx.TensorProto:
    return numpy_helper.from_array(np.asarray(values, np.float32), name)
