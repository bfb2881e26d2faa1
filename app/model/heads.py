"""Model heads: the task of a model and the format of its output tensors.

Formats are identified by the names, types and shapes in the model's config and by its `parameters`, never by values.
"""

from enum import Enum
from typing import Any, ClassVar, Literal, NamedTuple, TypeVar, get_args

import msgspec

from app.errors import UnsupportedModel
from app.model.anchors import possible_anchors
from app.model.triton_config import BYTES, ModelConfig, ModelParameters, Placement, Resize, ScoreKind, TensorConfig

Task = Literal["detection", "classification", "segmentation", "pose", "obb", "text_detection", "text_recognition", "embedding"]
TASKS: tuple[Task, ...] = get_args(Task)

_NAMED_TASKS = {"text_detection", "text_recognition", "embedding"}
"""Tasks that a config has to name, because their outputs do not tell them."""
_FEATURES: dict[str, Task] = {"det_masks": "segmentation", "det_keypoints": "pose", "det_angles": "obb"}
"""Names of the outputs of the models that `add` composes, for what a row has beyond its box, score and class."""
_FLOATS = {"TYPE_FP32", "TYPE_FP16"}
_DEFAULT_IOU = 0.7
OTHERS_IOU = 0.45
"""Default `iou` of YOLOv5 to v7 and YOLOX in their own code, which is not that of Ultralytics' later networks."""
_MAX_QUERIES = 300
_MAX_KEYPOINTS = 8192


class OutputFormat(Enum):
    """Format of a detector's outputs."""

    END_TO_END = "count, boxes, scores and classes in four tensors"
    SIX_COLUMNS = "rows of x1 y1 x2 y2 score class"
    DEEPSTREAM = "rows of x1 y1 x2 y2 score class, with duplicates"
    YOLO_HEAD = "raw head (4 + classes, anchors)"
    YOLOV5_HEAD = "decoded head (rows, 5 + classes)"
    YOLOX_HEAD = "raw head (anchors, 5 + classes)"
    RTDETR = "rows of cx cy w h, as fractions of the input, and class scores"


_OTHERS = frozenset({OutputFormat.DEEPSTREAM, OutputFormat.YOLOV5_HEAD, OutputFormat.YOLOX_HEAD})
RAW_HEADS = _OTHERS | {OutputFormat.YOLO_HEAD}
"""Formats with duplicate detections, which the gateway must suppress."""


class InputDefaults(NamedTuple):
    """Default preprocessing for a head; the model's config may override it."""

    resize: Resize
    placement: Placement = "center"
    channels: Literal["RGB", "BGR"] = "RGB"
    scale: float = 255.0


class DetectionHead(msgspec.Struct, frozen=True, kw_only=True):
    """Output of a detector."""

    task: ClassVar[Task] = "detection"
    noun: ClassVar[str] = "detector"
    route: ClassVar[str] = "/detect"
    may_be_cached: ClassVar[bool] = True
    """Whether a result is worth keeping: small, and about a whole image."""
    output_format: OutputFormat
    has_normalized_boxes: bool
    iou: float
    """Default intersection over union above which two boxes of a class count as one object."""
    max_iou: float
    """Maximum `iou` that callers may request: the threshold of the model's own NMS; 1 if it has none."""
    features: int = 0
    """Number of values of an object beyond its box, score and class."""

    @property
    def finds_once(self) -> bool:
        """Whether the model was trained to find each object once, without NMS in the model or the gateway."""
        return self.output_format not in RAW_HEADS and self.max_iou == 1

    @property
    def description(self) -> str:
        """Description of the output tensors."""
        return self.output_format.value

    @property
    def input_defaults(self) -> InputDefaults:
        """Default preprocessing."""
        if self.output_format is OutputFormat.YOLOX_HEAD:
            return InputDefaults("letterbox", "top_left", "BGR", 1.0)
        if self.output_format is OutputFormat.RTDETR:
            return InputDefaults("stretch")
        return InputDefaults("letterbox")


class SegmentationHead(DetectionHead, frozen=True, kw_only=True):
    """Output of a segmentation model: an object's features are the coefficients of its mask.

    The last tensor are the prototypes (coefficients, height, width): a mask is their sum, weighted by the coefficients.
    """

    task: ClassVar[Task] = "segmentation"
    noun: ClassVar[str] = "segmentation model"
    route: ClassVar[str] = "/segment"
    may_be_cached: ClassVar[bool] = False


class PoseHead(DetectionHead, frozen=True, kw_only=True):
    """Output of a pose model: an object's features are x, y and, if there are three values, the visibility of each keypoint."""

    task: ClassVar[Task] = "pose"
    noun: ClassVar[str] = "pose model"
    route: ClassVar[str] = "/pose"
    keypoint_names: tuple[str, ...]


class ObbHead(DetectionHead, frozen=True, kw_only=True):
    """Output of a model of oriented boxes: an object's feature is the angle in radians by which its box is turned."""

    task: ClassVar[Task] = "obb"
    noun: ClassVar[str] = "model of oriented boxes"
    route: ClassVar[str] = "/obb"


class ClassificationHead(msgspec.Struct, frozen=True, kw_only=True):
    """Output of a classifier: one score per class."""

    task: ClassVar[Task] = "classification"
    noun: ClassVar[str] = "classifier"
    route: ClassVar[str] = "/classify"
    may_be_cached: ClassVar[bool] = True
    features: ClassVar[int] = 0
    input_defaults: ClassVar[InputDefaults] = InputDefaults("center_crop")
    classes: int
    """Number of classes; -1 if the config does not specify it."""
    scores: ScoreKind

    @property
    def description(self) -> str:
        """Description of the output tensor."""
        return f"{self.scores} of {self.classes} classes" if self.classes > 0 else f"{self.scores} of the classes"


class TextDetectionHead(msgspec.Struct, frozen=True):
    """Output of a text detector: for each pixel of the input the probability that it belongs to text, UINT8 (of 255) or a float."""

    task: ClassVar[Task] = "text_detection"
    noun: ClassVar[str] = "text detector"
    route: ClassVar[str] = "/ocr/predict"
    may_be_cached: ClassVar[bool] = False
    features: ClassVar[int] = 0
    input_defaults: ClassVar[InputDefaults] = InputDefaults("text")
    description: ClassVar[str] = "map of text"


class TextRecognitionHead(msgspec.Struct, frozen=True):
    """Output of a model that reads a line: for each step from left to right the most likely class, and its probability.

    Class 0 is none (the blank of CTC), class n has the label n.
    """

    task: ClassVar[Task] = "text_recognition"
    noun: ClassVar[str] = "model that reads lines"
    route: ClassVar[str] = "/ocr/predict"
    may_be_cached: ClassVar[bool] = False
    features: ClassVar[int] = 0
    input_defaults: ClassVar[InputDefaults] = InputDefaults("line")
    description: ClassVar[str] = "a class and a score for each step of a line"


class EmbeddingHead(msgspec.Struct, frozen=True):
    """Output of a model that describes an image by a vector."""

    task: ClassVar[Task] = "embedding"
    noun: ClassVar[str] = "model of vectors"
    route: ClassVar[str] = "/embed/image"
    may_be_cached: ClassVar[bool] = True
    features: ClassVar[int] = 0
    input_defaults: ClassVar[InputDefaults] = InputDefaults("stretch")
    dimensions: int

    @property
    def description(self) -> str:
        """Description of the output tensor."""
        return f"vector of {self.dimensions} values"


Head = DetectionHead | ClassificationHead | TextDetectionHead | TextRecognitionHead | EmbeddingHead
HeadType = TypeVar("HeadType", DetectionHead, ClassificationHead, TextDetectionHead, TextRecognitionHead, EmbeddingHead)
HEADS: dict[Task, type[DetectionHead]] = {head.task: head for head in (DetectionHead, SegmentationHead, PoseHead, ObbHead)}
"""Heads with boxes, by task."""


def read_head(
    model: ModelConfig, hints: ModelParameters, batch_dims: int, input_size: tuple[int, int]
) -> tuple[Head, tuple[str, ...]]:
    """Identify the head of a model and the names of its tensors, whose first `batch_dims` dimensions are the batch."""
    if hints.task not in (None, *TASKS):
        raise UnsupportedModel(f"{model.name} is a model for the task {hints.task!r}; supported are {', '.join(TASKS)}")
    shapes = {tensor.name: tensor.dims[batch_dims:] for tensor in model.output if tensor.data_type != BYTES}
    types = {tensor.name: tensor.data_type for tensor in model.output}
    if hints.task in _NAMED_TASKS:
        return _read_named(model, hints, shapes, types)
    names: tuple[str, ...]
    extra: dict[str, list[int]] = {}
    if hints.task != "classification":
        extra = {name: shapes.pop(name) for name in (*shapes,) if name in _FEATURES or len(shapes[name]) == 3}  # noqa: PLR2004
    kind, features, more = _read_features(model, hints, extra)
    default: ScoreKind = "probabilities" if hints.is_ultralytics_classifier else "logits"
    match list(shapes.items()):
        case [(name, [classes])] if (
            hints.head is None and kind is DetectionHead and types[name] in _FLOATS and (classes > 1 or classes == -1)
        ):
            _check_labels(model, hints, classes)
            return ClassificationHead(classes=classes, scores=hints.scores or default), (name,)
        case [(name, [_, _] as dims)]:
            names = (name,)
            if features:
                output_format = _identify_rows(model, hints, dims, input_size, features)
            else:
                output_format = _identify_table(model, hints, dims, input_size)
            _check_labels(model, hints, _count_classes(output_format, dims) - features)
        case [_, _, _, _] if hints.head in (None, "end_to_end"):
            output_format, names = OutputFormat.END_TO_END, _identify_four(model, shapes, types)
        case _:
            raise unsupported(model)
    iou = hints.iou if hints.iou is not None else OTHERS_IOU if output_format in _OTHERS else _DEFAULT_IOU
    # Models with rows of six are trained to find each object once, unless their config sets `iou` for an NMS in the model.
    suppresses = output_format is OutputFormat.END_TO_END or (output_format is OutputFormat.SIX_COLUMNS and hints.iou is not None)
    if len(names) == 1 and extra.keys() & _FEATURES.keys():
        raise unsupported(model)
    head = kind(
        output_format=output_format,
        has_normalized_boxes=output_format is OutputFormat.RTDETR or hints.box_units == "normalized",
        iou=iou,
        max_iou=iou if suppresses else 1.0,
        features=features,
        **more,
    )
    return head, (*names, *sorted(extra, key=lambda name: name not in _FEATURES))


def _read_named(
    model: ModelConfig, hints: ModelParameters, shapes: dict[str, list[int]], types: dict[str, str]
) -> tuple[Head, tuple[str, ...]]:
    floats = [name for name in shapes if types[name] in _FLOATS]
    match hints.task, list(shapes.items()):
        case "text_detection", [(name, [_, _])]:
            return TextDetectionHead(), (name,)
        case "text_recognition", [(_, [_]), (_, [_])] if len(floats) == 1 and len(hints.class_names()) > 1:
            return TextRecognitionHead(), (*(shapes.keys() - floats), *floats)
        case "embedding", [(name, [size])] if size > 0 and floats:
            return EmbeddingHead(dimensions=size), (name,)
    raise unsupported(model)


def _read_features(
    model: ModelConfig, hints: ModelParameters, extra: dict[str, list[int]]
) -> tuple[type[DetectionHead], int, dict[str, Any]]:
    """Return the type of a head, the number of its features, and its further fields; `extra` are the shapes of their tensors."""
    named = [name for name in extra if name in _FEATURES]
    prototypes = [dims for name, dims in extra.items() if name not in _FEATURES]
    task = hints.task or (_FEATURES[named[0]] if named else "segmentation" if prototypes else "detection")
    match task, [extra[name] for name in named], prototypes:
        case "segmentation", [] | [[_, _]], [[count, _, _]] if count > 0:
            return SegmentationHead, count, {}
        case "pose", [] | [[_, _, 2 | 3]], []:
            shape = extra[named[0]][1:] if named else hints.keypoint_shape()
            if shape is None or shape[0] not in range(1, _MAX_KEYPOINTS + 1):
                raise UnsupportedModel(
                    f"{model.name} is a pose model; its config must have the exporter's `metadata` with `kpt_shape`, and at most "
                    f"{_MAX_KEYPOINTS} keypoints"
                )
            count, values = shape
            return PoseHead, count * values, {"keypoint_names": hints.keypoint_names(count) or (*map(str, range(count)),)}
        case "obb", [] | [[_]], []:
            return ObbHead, 1, {}
        case (("detection" | "classification"), [], []):
            return DetectionHead, 0, {}
    raise unsupported(model)


def _identify_rows(
    model: ModelConfig, hints: ModelParameters, dims: list[int], input_size: tuple[int, int], features: int
) -> OutputFormat:
    rows, columns = dims
    anchors = possible_anchors(input_size)
    if hints.head in (None, "end_to_end") and columns == 6 + features and rows not in anchors:
        return OutputFormat.SIX_COLUMNS
    if hints.head in (None, "yolo") and (rows == -1 or rows > 4 + features) and columns in (-1, *anchors):
        return OutputFormat.YOLO_HEAD
    raise unsupported(model)


def _identify_table(model: ModelConfig, hints: ModelParameters, dims: list[int], input_size: tuple[int, int]) -> OutputFormat:
    rows, columns = dims
    anchors = possible_anchors(input_size)
    if hints.head is not None:
        output_format, fits = {
            "yolo": (OutputFormat.YOLO_HEAD, min(dims) not in range(5) and (min(dims) > 0 or columns == -1 or columns > rows)),
            "yolov5": (OutputFormat.YOLOV5_HEAD, columns not in range(6) and (rows == -1 or rows > columns)),
            "yolox": (OutputFormat.YOLOX_HEAD, columns not in range(6) and rows in (-1, anchors[0])),
            "deepstream": (OutputFormat.DEEPSTREAM, columns in (-1, 6)),
            "end_to_end": (OutputFormat.SIX_COLUMNS, columns in (-1, 6)),
            "rtdetr": (OutputFormat.RTDETR, columns not in (*range(5), *anchors)),
        }[hints.head]
        if fits:
            return output_format
        raise unsupported(model)
    is_transposed_yolo = rows in anchors and len(hints.class_names()) == columns - 4 > 0
    if columns > 5 and rows == anchors[0] and not is_transposed_yolo:  # noqa: PLR2004
        return OutputFormat.YOLOX_HEAD
    if columns > 5 and rows in {3 * count for count in anchors}:  # noqa: PLR2004
        return OutputFormat.YOLOV5_HEAD
    if columns == 6 and rows not in anchors:  # noqa: PLR2004
        return OutputFormat.SIX_COLUMNS
    # Rows of seven may also be those of oriented boxes.
    if 0 < rows <= _MAX_QUERIES and len(hints.class_names()) == columns - 4 > 0 and (columns != 7 or hints.task == "detection"):  # noqa: PLR2004
        return OutputFormat.RTDETR
    if is_transposed_yolo or (rows > 4 and (columns == -1 or (columns > rows and columns in anchors))):  # noqa: PLR2004
        return OutputFormat.YOLO_HEAD
    raise unsupported(model)


def _count_classes(output_format: OutputFormat, dims: list[int]) -> int:
    match output_format:
        case OutputFormat.YOLO_HEAD:
            return (dims[1] if dims[0] > dims[1] > 0 else dims[0]) - 4
        case OutputFormat.RTDETR:
            return dims[1] - 4
        case OutputFormat.YOLOV5_HEAD | OutputFormat.YOLOX_HEAD:
            return dims[1] - 5
    return -1  # its shape does not tell


def _check_labels(model: ModelConfig, hints: ModelParameters, classes: int) -> None:
    labels = len(hints.class_names())
    if labels and classes > 0 and labels != classes:
        raise UnsupportedModel(
            f"{model.name} has {labels} labels for {classes} classes; its config needs one label for each class, or another `head` "
            "or `task`"
        )


def _identify_four(model: ModelConfig, shapes: dict[str, list[int]], types: dict[str, str]) -> tuple[str, ...]:
    boxes = [name for name, dims in shapes.items() if len(dims) == 2 and dims[1] == 4]  # noqa: PLR2004
    counts = [name for name, dims in shapes.items() if dims == [1] and "INT" in types[name]]
    rest = [name for name in shapes if name not in boxes + counts and len(shapes[name]) == 1]
    classes = [name for name in rest if "INT" in types[name]] or [n for n in rest if "class" in n.lower() or "label" in n.lower()]
    scores = [name for name in rest if name not in classes and "FP" in types[name]]
    if not len(boxes) == len(counts) == len(scores) == len(classes) == 1:
        raise unsupported(model)
    return counts[0], boxes[0], scores[0], classes[0]


def unsupported(model: ModelConfig) -> UnsupportedModel:
    """Return the error for a model without a matching format; it names the tensors."""

    def describe(tensors: list[TensorConfig]) -> str:
        return ", ".join(f"{t.name} {t.data_type.removeprefix('TYPE_')} {t.dims}" for t in tensors) or "none"

    return UnsupportedModel(
        f"the tensors of {model.name} match no supported head: inputs {describe(model.input)}; outputs {describe(model.output)}"
    )
