"""Small models of other tasks that really run in Triton: classifiers, and readers of text.

The scores of the classifiers are sums of an image's mean colour, which a test can compute. The readers "read" the scene: red
rectangles are an r, and blue ones, upside down, a b.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper, parser

from tests.fakes.models import config, save

SIDE = 32
LABELS = ("red", "green", "blue", "light")
WEIGHTS = np.array([[4, 0, 0], [0, 4, 0], [0, 0, 4], [1, 1, 1]], np.float32)
MEAN, STD = (0.5, 0.25, 0.125), (0.5, 0.25, 2.0)
"""Of those whose config has them."""


class Classifier(NamedTuple):
    element: str
    layout: str
    parameters: dict[str, str]
    after: str = "scores = Identity (logits)"
    output: str = "float"


CLASSIFIERS = {
    "planes_to_logits": Classifier("float", "CHW", {"crop": "1"}),
    "bytes_to_logits": Classifier("uint8", "HWC", {"crop": "1"}),
    "half_to_half": Classifier("float16", "HWC", {"crop": "1"}, "scores = Cast <to = 10> (logits)", "float16"),
    "normalized": Classifier(
        "float", "CHW", {"crop": "1", "mean": ",".join(map(str, MEAN)), "std": ", ".join(map(str, STD)), "channels": "BGR"}
    ),
    "probabilities": Classifier("float", "HWC", {"crop": "1", "scores": "probabilities"}, "scores = Softmax <axis = 1> (logits)"),
    "stretched": Classifier("float", "CHW", {"resize": "stretch", "interpolation": "bicubic"}),
    "letterboxed": Classifier("float", "CHW", {"resize": "letterbox", "pad": "0"}),
    "cropped": Classifier("float", "CHW", {"crop": "0.5"}),
    # Red is upright, blue upside down.
    "direction": Classifier("uint8", "HWC", {"crop": "1", "labels": "0,none,180,neither"}, "scores = Add (logits, logits)"),
    # Its config is wrong: it returns logits. A black image makes the score of a class infinite.
    "lying": Classifier("float", "CHW", {"scores": "probabilities"}),
    "infinite": Classifier("float", "CHW", {}, "inverse = Reciprocal (logits)\nscores = Identity (inverse)"),
}


def logits_of(colour: tuple[float, float, float]) -> NDArray[np.float32]:
    scores: NDArray[np.float32] = WEIGHTS @ np.array(colour, np.float32)
    return scores


def softmax(logits: NDArray[np.float32]) -> list[float]:
    powers = np.exp(logits.astype(np.float64))
    return list(powers / powers.sum())


def _onnx(made: Classifier) -> onnx.ModelProto:
    shape = f"3, {SIDE}, {SIDE}" if made.layout == "CHW" else f"{SIDE}, {SIDE}, 3"
    axes = "[2, 3]" if made.layout == "CHW" else "[1, 2]"
    scale = 255 if made.element == "uint8" else 1
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    classify ({made.element}[batch, {shape}] image) => ({made.output}[batch, {len(LABELS)}] scores) {{
        floats = Cast <to = 1> (image)
        sums = ReduceMean <axes = {axes}, keepdims = 0> (floats)
        scale = Constant <value_float = {scale}.0> ()
        means = Div (sums, scale)
        logits = MatMul (means, weights)
        {made.after}
    }}"""
    model = parser.parse_model(text)
    model.graph.initializer.append(numpy_helper.from_array(np.ascontiguousarray(WEIGHTS.T), "weights"))
    onnx.checker.check_model(model, full_check=True)
    return model


_READERS = {
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


def write_classifiers(repository: Path) -> None:
    """Put the classifiers into a model repository, one of them a second time without a batch dimension in its config."""
    for name, made in CLASSIFIERS.items():
        model = _onnx(made)
        save(repository, name, model, config(name, model, {"labels": ",".join(LABELS), **made.parameters}))
    model = _onnx(CLASSIFIERS["bytes_to_logits"])
    text = config("single", model, {"crop": "1", "labels": ""}).replace("max_batch_size: 4", "max_batch_size: 0")
    save(repository, "single", model, text.replace("dims: [", "dims: [1, "))


def write_readers(repository: Path) -> None:
    """Put the models of the cascade `ocr` into a model repository."""
    for name, (graph, parameters) in _READERS.items():
        model = parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> read {graph}')
        onnx.checker.check_model(model, full_check=True)
        save(repository, name, model, config(name, model, parameters))
