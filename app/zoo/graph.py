"""Parser of ONNX graphs as text, and the versions that all parts of a model use."""

import onnx
from onnx import parser

# The oldest opset of a model: the newest in which reductions take their axes as attributes; supported by TensorRT 8.6 and later.
OPSET = 17
IR_VERSION = 8


def parse(text: str) -> onnx.ModelProto:
    """Make a model from one graph in ONNX's text format."""
    return parser.parse_model(f'<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}]>\n{text}')
