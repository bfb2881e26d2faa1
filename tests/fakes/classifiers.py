"""Small classifiers that really run in Triton: the scores are sums of an image's mean colour, which a test can compute."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper, parser

from tests.fakes.models import config

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
    """Compute the logits for a mean colour, 0 to 1, as the graphs do."""
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


def write(repository: Path) -> None:
    """Put all of them into a model repository, one of them a second time without a batch dimension in its config."""
    for name, made in CLASSIFIERS.items():
        model = _onnx(made)
        _write(repository, name, model, config(name, model, {"labels": ",".join(LABELS), **made.parameters}))
    model = _onnx(CLASSIFIERS["bytes_to_logits"])
    text = config("single", model, {"crop": "1", "labels": ""}).replace("max_batch_size: 4", "max_batch_size: 0")
    _write(repository, "single", model, text.replace("dims: [", "dims: [1, "))


def _write(repository: Path, name: str, model: onnx.ModelProto, text: str) -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    onnx.save(model, folder / "model.onnx")
    (folder.parent / "config.pbtxt").write_text(text, encoding="utf-8")
