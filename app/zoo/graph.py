"""Graphs of standard operators, as text, and the versions in which all parts of a model are written."""

import onnx
from onnx import parser

# The newest opset whose reductions still take their axes as attributes; TensorRT 8.6 and later read it.
OPSET = 17
IR_VERSION = 8


def parse(text: str) -> onnx.ModelProto:
    """Make a model of one graph in ONNX's own notation."""
    return parser.parse_model(f'<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}]>\n{text}')
