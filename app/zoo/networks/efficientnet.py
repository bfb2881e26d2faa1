"""EfficientNet-Lite0 (Tan and Le, 2019), built from its weights.

It consists of inverted residual blocks as in MobileNetV2: a pointwise convolution to more channels, a depthwise convolution, and a
pointwise convolution to fewer channels. Unlike EfficientNet-B0, it has ReLU6 and no squeeze-and-excitation.
"""

from pathlib import Path

import numpy as np
import onnx

from app.zoo.graph import Graph, Value
from app.zoo.networks.torch_weights import Weights, read_weights

_SQUARE = 224
_BLOCKS = 16
_HALVING = (1, 3, 5, 11)
"""Blocks with stride 2, which the first convolution also has."""
_EPSILON = 1e-3


def load(file: Path, *, has_classes: bool = True) -> onnx.ModelProto:
    """Build the network from a file of PyTorch; the arguments and errors are otherwise those of `build_lite0`."""
    return build_lite0(read_weights(file), has_classes=has_classes)


def build_lite0(weights: Weights, *, has_classes: bool = True) -> onnx.ModelProto:
    """Build the network, with batch normalization folded into the convolutions; raise ValueError if a weight is missing."""
    # The weights have the names in EfficientNet implementations for PyTorch. The model has the input `images` FP32 (batch, 3, 224,
    # 224) and the output `logits` FP32 (batch, classes), or without the classes `features` FP32 (batch, 1280).
    layers = _Layers(weights)
    try:
        x = layers.convolve(layers.graph.input("images", 3, _SQUARE, _SQUARE), "_conv_stem", "_bn0", stride=2)
        for index in range(_BLOCKS):
            x = layers.transform(x, f"_blocks.{index}.", stride=2 if index in _HALVING else 1)
        result = layers.convolve(x, "_conv_head", "_bn1").op("GlobalAveragePool").op("Flatten")
        output, last = ("logits", "_fc") if has_classes else ("features", "_conv_head")
        if has_classes:
            result = result.op("Gemm", *(layers.graph.weight(name, weights[name]) for name in ("_fc.weight", "_fc.bias")), transB=1)
        return layers.graph.build("efficientnet_lite0", {output: (result, "FP32", (len(weights[f"{last}.weight"]),))})
    except KeyError as error:
        raise ValueError(f"{error} is missing among the weights") from error


class _Layers:
    def __init__(self, weights: Weights) -> None:
        self.graph = Graph()
        self._weights = weights

    def transform(self, x: Value, block: str, *, stride: int) -> Value:
        expand, project = f"{block}_expand_conv", f"{block}_project_conv"
        has_expansion = f"{expand}.weight" in self._weights
        wide = self.convolve(x, expand, f"{block}_bn0") if has_expansion else x
        deep = self.convolve(wide, f"{block}_depthwise_conv", f"{block}_bn1", stride=stride)
        result = self.convolve(deep, project, f"{block}_bn2", is_linear=True)
        channels = self._weights[f"{expand if has_expansion else project}.weight"].shape[1]
        is_same_shape = stride == 1 and channels == len(self._weights[f"{project}.weight"])
        return result + x if is_same_shape else result

    def convolve(self, x: Value, name: str, norm: str, *, stride: int = 1, is_linear: bool = False) -> Value:
        kernel = self._weights[f"{name}.weight"]
        factor = self._weights[f"{norm}.weight"] / np.sqrt(self._weights[f"{norm}.running_var"] + _EPSILON)
        bias = self._weights[f"{norm}.bias"] - self._weights[f"{norm}.running_mean"] * factor
        groups = len(kernel) if kernel.shape[1] == 1 else 1
        # TensorFlow, in which it was trained, puts odd padding at the bottom and right.
        kernel = kernel * factor[:, None, None, None]
        x = x.convolve(name, kernel, bias, strides=[stride, stride], group=groups, auto_pad="SAME_UPPER")
        return x if is_linear else x.op("Clip", 0.0, 6.0)
