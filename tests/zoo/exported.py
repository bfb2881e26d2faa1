"""Tiny networks with the tensors of exported ones; they find the same in every image."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import helper, numpy_helper, parser

from app.zoo.graph import IR_VERSION, OPSET
from app.zoo.recipe import SIZES

WIDE = (256, 128)
"""Width and height of an input with 672 anchors."""
IN_PIXELS = ("yolo", "yolov5", "deepstream", "end_to_end", "four_tensors")
_TYPES = {"float32": "float", "float16": "float16", "float64": "double", "int64": "int64", "int32": "int32"}


def parse(text: str) -> onnx.ModelProto:
    return parser.parse_model(f'<ir_version: {IR_VERSION}, opset_import: ["": {OPSET}]>\n{text}')


def exported(
    outputs: Mapping[str, NDArray[Any] | Sequence[int]],
    size: tuple[int | str, int | str] = (256, 256),
    *,
    batch: int | str = "batch",
    half: bool = False,
    symbolic: bool = False,
    **metadata: object,
) -> onnx.ModelProto:
    """Make a network that gives `outputs` for one image, or zeros of such shapes; `boxes` are fractions of the input `SIZES`."""
    # Its input has this `size`, width and height, for `batch` images; `half` makes its tensors FP16, `symbolic` their shapes.
    kind, body, results = "float16" if half else "float", "images_only = Shape <start = 0, end = 1> (images)", []
    given = {name: np.array(value) if isinstance(value, np.ndarray) else np.zeros(value) for name, value in outputs.items()}
    arrays = {name: value if value.dtype.kind == "i" else value.astype(f"f{2 if half else 4}") for name, value in given.items()}
    takes = [f"{kind}[{batch}, 3, {size[1]}, {size[0]}] images"]
    for name, value in arrays.items():
        dims = [f"{name}_{axis}" for axis in range(value.ndim)] if symbolic else map(str, value.shape)
        results.append(f"{_TYPES[value.dtype.name]}[{', '.join((str(batch), *dims))}] {name}")
        body += f"""
        ones_{name} = Constant <value_ints = {[1] * value.ndim}> ()
        repeats_{name} = Concat <axis = 0> (images_only, ones_{name})
        {"fractions" if name == "boxes" else name} = Tile (one_{name}, repeats_{name})"""
    if "boxes" in arrays:
        takes.append(f"int64[{batch}, 2] {SIZES}")
        body += f"""
        sides = Concat <axis = 1> ({SIZES}, {SIZES})
        middle = Constant <value_ints = [1]> ()
        sides_row = Unsqueeze (sides, middle)
        sides_float = Cast <to = {10 if half else 1}> (sides_row)
        boxes = Mul (fractions, sides_float)"""
    model = parse(f"""network ({", ".join(takes)}) => ({", ".join(results)}) {{ {body} }}""")
    model.graph.initializer.extend(numpy_helper.from_array(value[None], f"one_{name}") for name, value in arrays.items())
    helper.set_model_props(model, {key: str(value) for key, value in metadata.items()})
    return model


def head_tensors(head: str, unit: tuple[int, int] | None = None) -> dict[str, NDArray[Any]]:
    """Make what a head gives for an image of `WIDE` pixels with some objects of three classes, in this unit or its own."""
    random, unit = np.random.default_rng(7), unit or (WIDE if head in IN_PIXELS else (1, 1))
    rows = {"yolo": 672, "yolov5": 3 * 672, "yolox": 672, "deepstream": 672}.get(head, 40)
    centres, sizes = random.uniform(0.2, 0.8, (rows, 2)) * unit, random.uniform(0.1, 0.3, (rows, 2)) * unit
    scores = random.uniform(0, 1, (rows, 3)) * (random.uniform(size=(rows, 1)) < 80 / rows)
    corners, objectness = [centres - sizes / 2, centres + sizes / 2], random.uniform(0, 1, (rows, 1))
    classes = random.integers(0, 3, (rows, 1))
    tensors: dict[str, dict[str, NDArray[Any]]] = {
        "yolo": {"output0": np.hstack([centres, sizes, scores]).T},
        "yolov5": {"output": np.hstack([centres, sizes, objectness, scores])},
        "yolox": {"output": np.hstack([random.uniform(-1, 1, (rows, 4)), objectness, scores])},
        "deepstream": {"output": np.hstack([*corners, objectness, classes])},
        "end_to_end": {"output0": np.hstack([*corners, objectness, classes])},
        "four_tensors": {
            "num_dets": np.array([30], np.int32),
            "det_boxes": np.hstack(corners),
            "det_scores": objectness[:, 0],
            "det_classes": classes[:, 0].astype(np.int32),
        },
        "rtdetr": {"output0": np.hstack([centres, sizes, scores])},
        "rtdetr_topk": {"output0": np.hstack([centres, sizes, objectness, classes])},
        "rfdetr": {"dets": np.hstack([centres, sizes]), "labels": random.uniform(-5, 3, (rows, 4))},
        "detr": {"logits": random.uniform([-5, -5, -5, 0], [3, 3, 3, 6], (rows, 4)), "pred_boxes": np.hstack([centres, sizes])},
        "detr_sigmoid": {"logits": random.uniform(-5, 3, (rows, 3)), "pred_boxes": np.hstack([centres, sizes])},
        "dfine": {"labels": classes[:, 0], "boxes": np.hstack(corners), "scores": objectness[:, 0]},
    }
    return tensors[head]


FEATURES: dict[str, dict[str, Any]] = {
    "segmentation": {"task": "segment"},
    "pose": {"task": "pose", "kpt_shape": [2, 3], "kpt_names": {0: ["nose", "tail"], 1: ["nose", "tail"], 2: ["nose", "tail"]}},
    "obb": {"task": "obb"},
}
"""What Ultralytics writes into networks with features, by task."""


def feature_tensors(task: str, head: str) -> dict[str, NDArray[Any]]:
    """Make the tensors of `head_tensors` with features; prototypes come first."""
    ((name, table),) = head_tensors(head, WIDE).items()
    random = np.random.default_rng(8)
    features = random.uniform(-2, 2, ({"segmentation": 5, "pose": 6, "obb": 1}[task], 672 if head == "yolo" else 40))
    if head == "end_to_end" and task == "obb":
        table[:, 2:4] -= table[:, :2]
        table[:, :2] += table[:, 2:4] / 2
    tables = {name: np.vstack([table, features]) if head == "yolo" else np.hstack([table, features.T])}
    return {"output1": random.uniform(-2, 2, (5, 32, 64)), **tables} if task == "segmentation" else tables
