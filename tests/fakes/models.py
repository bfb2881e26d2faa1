"""Small models that really run in Triton, one per tensor format that users bring: they find red and blue rectangles.

Colours show whether channels and scale arrived right, positions whether the letterbox did.
"""

import json
from io import BytesIO
from pathlib import Path
from textwrap import dedent
from typing import Any, NamedTuple

import numpy as np
import onnx
from numpy.typing import NDArray
from onnx import numpy_helper, parser
from PIL import Image, ImageDraw

from app.model.anchors import anchor_grid

SIDE = 128
GRID, STRIDES = anchor_grid((SIDE, SIDE))
ANCHORS = len(GRID)
SIZE = (200, 100)
RECTANGLES = {"red": (20, 30, 80, 90), "blue": (120, 10, 180, 60)}
"""x1 y1 x2 y2 in pixels of the scene."""
FACE = np.array([[0.3, 0.4], [0.7, 0.4], [0.5, 0.6], [0.35, 0.8], [0.65, 0.8]], np.float32)
"""Where `faces_detection` finds both eyes, the nose and the corners of the mouth in each rectangle, as fractions of it."""


def scene(image_format: str, background: str = "white", shift: int = 0) -> bytes:
    """Draw a red and a blue rectangle, so many pixels further to the right."""
    image = Image.new("RGB", SIZE, background)
    for colour, (x1, y1, x2, y2) in RECTANGLES.items():
        ImageDraw.Draw(image).rectangle((x1 + shift, y1, x2 + shift - 1, y2 - 1), fill=colour)
    file = BytesIO()
    image.save(file, image_format)
    return file.getvalue()


# RGB planes 0..1, FLOAT (batch, 3, SIDE, SIDE), become corners (batch, 2, 4), score (batch, 2).
_FIND = """
    high = Constant <value_float = 0.7> ()
    low = Constant <value_float = 0.3> ()
    one = Constant <value_int = 1> ()
    red, green, blue = Split <axis = 1> (planes)
    red_high = Greater (red, high)
    blue_high = Greater (blue, high)
    red_low = Less (red, low)
    green_low = Less (green, low)
    blue_low = Less (blue, low)
    red_not_green = And (red_high, green_low)
    is_red = And (red_not_green, blue_low)
    blue_not_green = And (blue_high, green_low)
    is_blue = And (blue_not_green, red_low)
    both = Concat <axis = 1> (is_red, is_blue)
    masks = Cast <to = 1> (both)
    columns = ReduceMax <axes = [2], keepdims = 0> (masks)
    rows = ReduceMax <axes = [3], keepdims = 0> (masks)
    left = ArgMax <axis = 2> (columns)
    top = ArgMax <axis = 2> (rows)
    last_column = ArgMax <axis = 2, select_last_index = 1> (columns)
    last_row = ArgMax <axis = 2, select_last_index = 1> (rows)
    right = Add (last_column, one)
    bottom = Add (last_row, one)
    corners_int = Concat <axis = 2> (left, top, right, bottom)
    corners = Cast <to = 1> (corners_int)
    present = ReduceMax <axes = [2], keepdims = 0> (columns)
    weights = Constant <value_floats = [0.9, 0.8]> ()
    score = Mul (present, weights)
    unsqueeze_last = Constant <value_ints = [2]> ()
    score_column = Unsqueeze (score, unsqueeze_last)
    zeros = Sub (score, score)
    ids = Constant <value_floats = [0.0, 1.0]> ()
    classes = Add (zeros, ids)
    class_column = Unsqueeze (classes, unsqueeze_last)
"""

# Both objects again and again over all anchors, each copy a little less certain, so that only an NMS leaves one.
_ANCHORS = """
    top_left, bottom_right = Split <axis = 2> (corners)
    sum = Add (top_left, bottom_right)
    two = Constant <value_float = 2.0> ()
    centre2 = Div (sum, two)
    size2 = Sub (bottom_right, top_left)
    centre = Tile (centre2, repeats)
    size = Tile (size2, repeats)
    one_hot2 = Mul (score_column, eye)
    one_hot = Tile (one_hot2, repeats)
    likelihood = Mul (one_hot, decay)
"""

# Objectness times class score is the likelihood.
_OBJECTNESS = """
    sure = ReduceMax <axes = [2], keepdims = 1> (likelihood)
    nothing = Sub (score_column, score_column)
    eyes = Add (nothing, eye)
    class_score = Tile (eyes, repeats)
"""

# Fails as a whole if a pixel of any image is black; an image with a green pixel gets a score that is not a number.
_FRAGILE = """
    brightest = ReduceMax <axes = [1], keepdims = 1> (planes)
    darkest = ReduceMin <axes = [2, 3], keepdims = 0> (brightest)
    black = Constant <value_float = 0.02> ()
    has_black = Less (darkest, black)
    index = Cast <to = 7> (has_black)
    only_one = Constant <value_floats = [1.0]> ()
    sound = Gather <axis = 0> (only_one, index)
    not_red = Sub (green, red)
    greenness = Sub (not_red, blue)
    greenest = ReduceMax <axes = [2, 3], keepdims = 0> (greenness)
    less_green = Sub (high, greenest)
    root = Sqrt (less_green)
    ratio = Div (root, root)
    sound_and_finite = Mul (sound, ratio)
    checked = Mul (score, sound_and_finite)
    checked_column = Unsqueeze (checked, unsqueeze_last)
    output0 = Concat <axis = 2> (corners, checked_column, class_column)
"""

_BGR_255 = """
    bgr = Constant <value_ints = [2, 1, 0]> ()
    rgb = Gather <axis = 1> (image, bgr)
    scale = Constant <value_float = 255.0> ()
    planes = Div (rgb, scale)
"""
_ROWS = "output0 = Concat <axis = 2> (corners, score_column, class_column)"
_ANGLE = """
    angle = Sub (score_column, score_column)
    output0 = Concat <axis = 2> (centre2, size2, score_column, class_column, angle)
"""
_COUNT = """
    ones = Sign (score)
    count_axis = Constant <value_ints = [1]> ()
    count = ReduceSum <keepdims = 1> (ones, count_axis)
    num_dets = Cast <to = 6> (count)
    det_scores = Identity (score)
"""
_HALF = """
    valid_rows = Cast <to = 7> (count)
    boxes_half = Cast <to = 10> (corners)
    confidences = Cast <to = 10> (score)
    labels = Cast <to = 7> (classes)
"""
_NORMALIZED = f"""
    side = Constant <value_float = {SIDE}.0> ()
    det_boxes = Div (corners, side)
    det_classes = Identity (classes)
"""
_FACES = """
    det_boxes = Identity (corners)
    det_classes = Sub (classes, classes)
    corner, end = Split <axis = 2> (corners)
    extent = Sub (end, corner)
    third = Constant <value_ints = [2]> ()
    corner_of_each = Unsqueeze (corner, third)
    extent_of_each = Unsqueeze (extent, third)
    offsets = Mul (extent_of_each, face)
    det_keypoints = Add (corner_of_each, offsets)
"""
_YOLO = """
    rows_of_head = Concat <axis = 2> (centre, size, likelihood)
    output0 = Transpose <perm = [0, 2, 1]> (rows_of_head)
"""
_YOLOX = """
    cell = Div (centre, strides)
    offset = Sub (cell, grid)
    least = Constant <value_float = 0.01> ()
    positive = Max (size, least)
    relative = Div (positive, strides)
    log_size = Log (relative)
    output = Concat <axis = 2> (offset, log_size, sure, class_score)
"""
_DECODED = "output = Concat <axis = 2> (centre, size, sure, class_score)"
_RTDETR = f"""
    side = Constant <value_float = {SIDE}.0> ()
    pixels = Concat <axis = 2> (centre2, size2)
    fractions = Div (pixels, side)
    output0 = Concat <axis = 2> (fractions, one_hot2)
"""
# The mean colour of each quarter of the image.
_QUARTERS = "quarters = AveragePool <kernel_shape = [64, 64], strides = [64, 64]> (planes)\n vector = Flatten (quarters)"


class _Network(NamedTuple):
    graph: str
    """What follows on the rectangles that were found."""
    outputs: str
    """Types, shapes without the batch, and names."""
    parameters: dict[str, str] = {}  # noqa: RUF012 - never changed
    element: str = "float"
    before: str = "planes = Identity (image)"


_FOUR = "int32[1] num_dets, float[2, 4] det_boxes, float[2] det_scores, float[2] det_classes"
_HALF_OUTPUTS = "int64[2] labels, float16[2] confidences, float16[2, 4] boxes_half, int64[1] valid_rows"
_LANDMARKS = {"landmarks": ",".join(map(str, FACE.ravel())), "match_distance": "0.6"}
_KEYPOINTS = {"labels": "face", "keypoints": "left_eye,right_eye,nose,left_mouth,right_mouth"}
_NETWORKS = {
    "six_columns": _Network(_ROWS, "float[2, 6] output0"),
    "stretched_columns": _Network(_ROWS, "float[2, 6] output0", {"resize": "stretch"}),
    "oriented": _Network(_ANCHORS + _ANGLE, "float[2, 7] output0", {"task": "obb"}),
    "fragile": _Network(_FRAGILE, "float[2, 6] output0"),
    "extra_string": _Network(f"{_ROWS}\nnotes = Cast <to = 8> (score)", "float[2, 6] output0, string[2] notes"),
    "half_four_tensors": _Network(_COUNT + _HALF, _HALF_OUTPUTS, {}, "float16", "planes = Cast <to = 1> (image)"),
    "normalized_float_classes": _Network(_COUNT + _NORMALIZED, _FOUR, {"box_units": "normalized"}),
    "faces_detection": _Network(_COUNT + _FACES, f"{_FOUR}, float[2, 5, 2] det_keypoints", _KEYPOINTS),
    "faces_description": _Network(_QUARTERS, "float[12] vector", {"task": "embedding", **_LANDMARKS}),
    "embedding": _Network(_QUARTERS, "float[12] vector", {"task": "embedding"}),
    "yolo_head": _Network(_ANCHORS + _YOLO, f"float[6, {ANCHORS}] output0"),
    "yolox_head": _Network(_ANCHORS + _OBJECTNESS + _YOLOX, f"float[{ANCHORS}, 7] output", before=_BGR_255),
    "decoded_head": _Network(_ANCHORS + _OBJECTNESS + _DECODED, f"float[{ANCHORS}, 7] output", {"head": "yolov5"}),
    "rtdetr": _Network(_ANCHORS + _RTDETR, "float[2, 6] output0", {"head": "rtdetr"}),
}


def _onnx(network: _Network) -> onnx.ModelProto:
    text = f"""<ir_version: 8, opset_import: ["": 17]>
    find ({network.element}[batch, 3, {SIDE}, {SIDE}] image) => ({network.outputs.replace("[", "[batch, ")}) {{
        {network.before} {_FIND} {network.graph}
    }}"""
    model = parser.parse_model(text)
    constants: dict[str, NDArray[Any]] = {
        "repeats": np.array([1, ANCHORS // 2, 1], np.int64),
        "eye": np.eye(2, dtype=np.float32)[None],
        "decay": np.linspace(1, 0.5, ANCHORS, dtype=np.float32)[None, :, None],
        "grid": GRID[None],
        "strides": STRIDES[None],
        "face": FACE[None, None],
    }
    used = {name for node in model.graph.node for name in node.input}
    model.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items() if name in used)
    onnx.checker.check_model(model, full_check=True)
    return model


def models() -> dict[str, tuple[onnx.ModelProto, dict[str, str]]]:
    return {name: (_onnx(network), dict(network.parameters)) for name, network in _NETWORKS.items()}


_KINDS = {1: "TYPE_FP32", 2: "TYPE_UINT8", 10: "TYPE_FP16", 6: "TYPE_INT32", 7: "TYPE_INT64", 8: "TYPE_STRING"}


def config(name: str, model: onnx.ModelProto, parameters: dict[str, str]) -> str:
    def tensors(key: str, values: list[onnx.ValueInfoProto]) -> str:
        return "\n".join(
            f'{key} {{ name: "{v.name}" data_type: {_KINDS[v.type.tensor_type.elem_type]} '
            f"dims: {[dim.dim_value or -1 for dim in v.type.tensor_type.shape.dim[1:]]} }}"
            for v in values
        )

    texts = {"labels": "red,blue", **parameters}
    return "\n".join(
        [
            f'name: "{name}"\nbackend: "onnxruntime"\nmax_batch_size: 4\ninstance_group [ {{ kind: KIND_CPU }} ]',
            tensors("input", list(model.graph.input)),
            tensors("output", list(model.graph.output)),
            *(
                f"parameters {{ key: {json.dumps(key)} value {{ string_value: {json.dumps(text)} }} }}"
                for key, text in texts.items()
            ),
        ]
    )


def save(repository: Path, name: str, model: onnx.ModelProto, text: str) -> None:
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    onnx.save(model, folder / "model.onnx")
    (folder.parent / "config.pbtxt").write_text(text, encoding="utf-8")


_FILE_CONFIG = f"""
name: "file_in"
backend: "python"
max_batch_size: 0
instance_group [ {{ kind: KIND_CPU }} ]
input {{ name: "file" data_type: TYPE_STRING dims: [ 1 ] }}
output {{ name: "output0" data_type: TYPE_FP32 dims: [ 2, 6 ] }}
parameters {{ key: "labels" value {{ string_value: "red,blue" }} }}
parameters {{ key: "square" value {{ string_value: "{SIDE}" }} }}
parameters {{ key: "placement" value {{ string_value: "top_left" }} }}
parameters {{ key: "box_units" value {{ string_value: "pixels" }} }}
"""

# It reads what it is given, so it finds nothing unless the file arrives as it was sent.
_FILE_MODEL = f"""
import struct
import numpy as np
import triton_python_backend_utils as triton


class TritonPythonModel:
    def execute(self, requests):
        return [triton.InferenceResponse([triton.Tensor("output0", find(request))]) for request in requests]


def find(request):
    file = triton.get_input_tensor_by_name(request, "file").as_numpy()[0]
    start, width, height = struct.unpack_from("<I4xii", file, 10)
    stride = (width * 3 + 3) // 4 * 4
    rows = np.frombuffer(file, np.uint8, stride * height, start).reshape(height, stride)[::-1, : width * 3]
    blue, green, red = rows.reshape(height, width, 3).transpose(2, 0, 1).astype(int)
    scale = {SIDE} / max(width, height)
    table = np.zeros((2, 6), np.float32)
    for id_, mask in enumerate([(red > 180) & (green < 80) & (blue < 80), (blue > 180) & (green < 80) & (red < 80)]):
        y, x = mask.nonzero()
        table[id_] = [x.min() * scale, y.min() * scale, (x.max() + 1) * scale, (y.max() + 1) * scale, 0.9, id_]
    return table
"""

_TEXT_CONFIG = """
name: "letters"
backend: "python"
max_batch_size: 0
instance_group [ { kind: KIND_CPU } ]
input { name: "text" data_type: TYPE_STRING dims: [ 1 ] }
output { name: "vector" data_type: TYPE_FP32 dims: [ 4 ] }
parameters { key: "task" value { string_value: "embedding" } }
parameters { key: "square" value { string_value: "32" } }
"""

# Counts the bytes a, b, c, and others.
_TEXT_MODEL = """
import numpy as np
import triton_python_backend_utils as triton


class TritonPythonModel:
    def execute(self, requests):
        return [triton.InferenceResponse([triton.Tensor("vector", count(request))]) for request in requests]


def count(request):
    text = triton.get_input_tensor_by_name(request, "text").as_numpy()[0]
    found = [text.count(letter) for letter in (b"a", b"b", b"c")]
    return np.array([*found, len(text) - sum(found)], np.float32)
"""


def write(repository: Path) -> None:
    """Put all of them into a model repository, one of them a second time with its batch dimension written out.

    Triton itself batches the requests for `fragile`. `person_and_car` is what it calls the red rectangle and the blue one. Of
    `two_versions`, the second is less certain of what it finds than the first.
    """
    made = {name: (model, config(name, model, parameters)) for name, (model, parameters) in models().items()}
    model, text = made["six_columns"]
    text = text.replace("six_columns", "unbatched").replace("max_batch_size: 4", "max_batch_size: 0")
    made["fragile"] = made["fragile"][0], made["fragile"][1] + "\ndynamic_batching {}"
    made["unbatched"] = model, text.replace("dims: [", "dims: [1, ")
    made["two_versions"] = model, made["six_columns"][1].replace("six_columns", "two_versions") + "\nversion_policy { all {} }"
    text = made["six_columns"][1].replace("six_columns", "person_and_car").replace("red,blue", "person,car")
    made["person_and_car"] = made["six_columns"][0], text
    for name, (model, text) in made.items():
        save(repository, name, model, text)
    (repository / "two_versions" / "2").mkdir()
    model = onnx.load(repository / "two_versions" / "1" / "model.onnx")
    (weights,) = (node for node in model.graph.node if node.output == ["weights"])
    weights.attribute[0].floats[:] = [0.6, 0.5]
    onnx.save(model, repository / "two_versions" / "2" / "model.onnx")
    for name, program, text in (("file_in", _FILE_MODEL, _FILE_CONFIG), ("letters", _TEXT_MODEL, _TEXT_CONFIG)):
        folder = repository / name / "1"
        folder.mkdir(parents=True)
        (folder / "model.py").write_text(dedent(program), encoding="utf-8")
        (folder.parent / "config.pbtxt").write_text(text, encoding="utf-8")
