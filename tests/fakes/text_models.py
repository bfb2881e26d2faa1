"""Small models that really run in Triton and "read" the scene: red rectangles are an r, and blue ones, upside down, a b."""

from pathlib import Path

import onnx
from onnx import parser

from tests.fakes.models import config

_MODELS = {
    # What is not white is text.
    "ocr_detection": (
        """(uint8[batch, height, width, 3] image) => (float[batch, height, width] map) {
    pixels = Cast <to = 1> (image)
    darkest = ReduceMin <axes = [3], keepdims = 0> (pixels)
    half = Constant <value_float = 128.0> ()
    is_dark = Less (darkest, half)
    map = Cast <to = 1> (is_dark)
}""",
        {"task": "text_detection", "square": "128"},
    ),
    "ocr_direction": (
        """(uint8[batch, 48, 192, 3] image) => (float[batch, 2] probabilities) {
    pixels = Cast <to = 1> (image)
    mean = ReduceMean <axes = [1, 2], keepdims = 0> (pixels)
    red, green, blue = Split <axis = 1> (mean)
    is_blue = Greater (blue, red)
    turned = Cast <to = 1> (is_blue)
    one = Constant <value_float = 1.0> ()
    upright = Sub (one, turned)
    probabilities = Concat <axis = 1> (upright, turned)
}""",
        {"task": "classification", "labels": "0,180", "resize": "line", "widths": "192", "scores": "probabilities"},
    ),
    # An r has the score 0.9, a b 0.7.
    "ocr_recognition": (
        """(uint8[batch, 48, width, 3] image) => (int64[batch, width] classes, float[batch, width] scores) {
    pixels = Cast <to = 1> (image)
    columns = ReduceMean <axes = [1], keepdims = 0> (pixels)
    red_column, green_column, blue_column = Split <axis = 2> (columns)
    last = Constant <value_ints = [2]> ()
    red = Squeeze (red_column, last)
    blue = Squeeze (blue_column, last)
    redness = Sub (red, blue)
    blueness = Sub (blue, red)
    little = Constant <value_float = 40.0> ()
    is_red = Greater (redness, little)
    is_blue = Greater (blueness, little)
    r = Cast <to = 7> (is_red)
    b = Cast <to = 7> (is_blue)
    b_twice = Add (b, b)
    classes = Add (r, b_twice)
    much = Constant <value_float = 0.9> ()
    less = Constant <value_float = 0.2> ()
    b_score = Cast <to = 1> (b)
    doubt = Mul (b_score, less)
    scores = Sub (much, doubt)
}""",
        {"task": "text_recognition", "labels": '["", "r", "b"]', "widths": "160,320"},
    ),
}


def write(repository: Path) -> None:
    """Put the models of the cascade `ocr` into a model repository."""
    for name, (graph, parameters) in _MODELS.items():
        model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> read {graph}')
        onnx.checker.check_model(model, full_check=True)
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        onnx.save(model, folder / "model.onnx")
        (folder.parent / "config.pbtxt").write_text(config(name, model, parameters), encoding="utf-8")
