"""dlib's network that describes faces (King, 2017), built from its weights.

A ResNet of 29 convolutions, like ResNet-34 with half of the channels. The vectors of two pictures of a person lie nearer to each
other than those of two persons, by their Euclidean distance. Source: dlib/examples/dnn_face_recognition_ex.cpp, and
src/faceRecognitionNet in the npm package @vladmandic/face-api, whose weights are quantized to 8 bits.
"""

import json
from math import prod
from pathlib import Path

import numpy as np
import onnx

from app.zoo.graph import Graph, Value
from app.zoo.networks.torch_weights import Weights

_MANIFEST = "face_recognition_model-weights_manifest.json"
_SIDE = 150
_BLOCKS = ("32_1", "32_2", "32_3", "64_down", "64_1", "64_2", "64_3", "128_down", "128_1", "128_2", "256_down", "256_1", "256_2")
_LAST = "256_down_out"


def load(file: Path) -> onnx.ModelProto:
    """Build the network from the file of its weights, with the manifest beside it; raise ValueError if they do not fit."""
    return build_network(read_weights(file, file.with_name(_MANIFEST)))


def read_weights(file: Path, manifest: Path) -> Weights:
    """Read tensors from a file of TensorFlow.js: FP32, kernels (outputs, inputs, height, width); raise ValueError for others."""
    try:
        numbers, weights, start = file.read_bytes(), {}, 0
        for entry in json.loads(manifest.read_bytes())[0]["weights"]:
            coding = entry.get("quantization", {"dtype": entry["dtype"], "scale": 1.0, "min": 0.0})
            kind = np.dtype(coding["dtype"])
            end = start + prod(entry["shape"]) * kind.itemsize
            steps = np.frombuffer(numbers[start:end], kind).reshape(entry["shape"])
            values = (steps * coding["scale"] + coding["min"]).astype(np.float32)
            weights[entry["name"]] = values.transpose(3, 2, 0, 1) if values.ndim == 4 else values  # noqa: PLR2004
            start = end
    except Exception as error:  # a damaged file can raise any
        raise ValueError(f"these are not weights with their manifest: {error}") from error
    return weights


def build_network(weights: Weights) -> onnx.ModelProto:
    """Build the network, with its scale layers folded into the convolutions; raise ValueError if a weight is missing."""
    # The model has the input `images` FP32 (batch, 3, 150, 150), RGB: (value - mean) / 256 of each byte, with the mean 122.782
    # 117.001 104.298; and the output `embedding` FP32 (batch, 128).
    try:
        layers = _Layers(weights)
        x = layers.convolve(layers.graph.input("images", 3, _SIDE, _SIDE), "conv32_down", stride=2)
        x = x.op("MaxPool", kernel_shape=[3, 3], strides=[2, 2])
        for block in (*_BLOCKS, _LAST):
            x = layers.add_residual(x, f"conv{block}", is_down="down" in block)
        vector = x.op("ReduceMean", axes=[2, 3], keepdims=0).op("MatMul", layers.graph.weight("fc", weights["fc"]))
    except KeyError as error:
        raise ValueError(f"{error} is missing among the weights") from error
    return layers.graph.build("dlib_resnet", {"embedding": (vector, "FP32", weights["fc"].shape[1:])})


class _Layers:
    def __init__(self, weights: Weights) -> None:
        self.graph = Graph()
        self._weights = weights
        self._side = (_SIDE - 7) // 2 // 2  # after the first convolution and the pooling
        self._channels = 32

    def add_residual(self, x: Value, name: str, *, is_down: bool) -> Value:
        # If `is_down`, both have half of the side, and zeros fill what one of them lacks.
        deep = self.convolve(x, f"{name}/conv1", stride=2 if is_down else 1)
        deep = self.convolve(deep, f"{name}/conv2", is_linear=True)
        if is_down:
            channels = len(self._weights[f"{name}/conv2/conv/bias"])
            missing = self._side // 2 - (self._side - 3) // 2 - 1
            x = _pad(x.op("AveragePool", kernel_shape=[2, 2], strides=[2, 2]), channels - self._channels, 0, 0)
            deep = _pad(deep, 0, missing, missing)
            self._side, self._channels = self._side // 2, channels
        return (deep + x).op("Relu")

    def convolve(self, x: Value, name: str, *, stride: int = 1, is_linear: bool = False) -> Value:
        # With a stride it has no padding.
        factor, shift = (self._weights[f"{name}/scale/{part}"] for part in ("weights", "biases"))
        kernel = self._weights[f"{name}/conv/filters"] * factor[:, None, None, None]
        bias = self._weights[f"{name}/conv/bias"] * factor + shift
        pads = [0 if stride > 1 else kernel.shape[2] // 2] * 4
        x = x.convolve(name, kernel, bias, strides=[stride, stride], pads=pads)
        return x if is_linear else x.op("Relu")


def _pad(x: Value, *after: int) -> Value:
    return x.op("Pad", [0, 0, 0, 0, 0, *after]) if any(after) else x
