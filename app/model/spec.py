"""What the gateway must know of a model, all of it derived from the model's Triton config.

Formats are recognised by the names, types and shapes in the config and by its `parameters` (`triton_config` lists them);
never by looking at values.
"""

import math
from enum import Enum
from functools import cached_property
from typing import Any, Literal

import msgspec
import numpy as np

from app.errors import UnsupportedModel
from app.model.anchors import count_anchors
from app.model.reference import refer_to
from app.model.triton_config import ModelConfig, ModelParameters, Placement, TensorConfig

_DTYPES: dict[str, type[np.generic]] = {"TYPE_UINT8": np.uint8, "TYPE_FP32": np.float32, "TYPE_FP16": np.float16}
_DATATYPES: dict[type[np.generic] | None, str] = {np.uint8: "UINT8", np.float16: "FP16", np.float32: "FP32", None: "BYTES"}
_OUTPUT_DTYPES = {
    **{f"TYPE_FP{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    **{f"TYPE_INT{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"TYPE_UINT{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    "TYPE_BOOL": np.dtype(bool),
}
_BYTES = "TYPE_STRING"
DECODED = "decoded"
"""Name of the output by which a model that takes files tells of each, in one number, whether it could be decoded."""
_DEFAULT_SIDE = 640
_DEFAULT_IOU = 0.7
# Larger files are rare; they travel inside the request.
_MAX_SHARED_FILE_BYTES = 1 << 20


class InputFormat(Enum):
    """How the image is handed to the model."""

    HWC = "height, width, channel"
    CHW = "channel, height, width"
    FILE = "the encoded file"


class OutputFormat(Enum):
    """How detections come out of the model: a description, and whether decoding them takes milliseconds of numpy."""

    END_TO_END = "count, boxes, scores and classes in four tensors", False
    SIX_COLUMNS = "rows of x1 y1 x2 y2 score class", False
    YOLO_HEAD = "raw head (4 + classes, anchors)", True
    YOLOX_HEAD = "raw head (anchors, 5 + classes)", True

    def __init__(self, description: str, is_heavy: bool) -> None:  # noqa: FBT001 - the second part of a member's value
        self.description = description
        self.is_heavy = is_heavy
        """Whether it must be decoded in a thread, not on the event loop."""


RAW_HEADS = frozenset({OutputFormat.YOLO_HEAD, OutputFormat.YOLOX_HEAD})
"""Formats that find each object many times: the gateway has to suppress boxes."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True, dict=True):  # `dict` for the cached properties
    """One model, as the gateway sees it."""

    name: str
    version: str
    is_pinned: bool = False
    """Whether requests ask for this version; otherwise Triton chooses, and may choose a newer one by now."""
    backend: str
    """Triton's name for what runs it, such as `onnxruntime`; `ensemble` for one."""
    device: Literal["cpu", "gpu"]
    max_batch: int
    """How many images a call may have."""
    instances: int
    """How many batches Triton can process at a time; of an ensemble, at least one for each of its steps."""
    input_name: str
    dtype: type[np.generic] | None
    """None for a model that takes the encoded file."""
    input_format: InputFormat
    has_batch_dimension: bool
    input_size: tuple[int, int]
    """Width and height of the model's input, pixels."""
    output_names: tuple[str, ...]
    """Names of the output tensors; for END_TO_END in the order of its description."""
    output_dtypes: tuple[np.dtype[Any] | None, ...]
    """Their types, in the same order; None for one that is not checked."""
    output_format: OutputFormat
    tells_decoded: bool
    """Whether there is an output `DECODED`, too."""
    placement: Placement
    enlarge: bool
    pad: int
    channels: Literal["RGB", "BGR"]
    scale: float
    """Divisor of each byte, for a float input."""
    has_normalized_boxes: bool
    iou: float
    """Intersection over union above which two boxes of a class are one object, unless the caller says otherwise."""
    max_iou: float
    """The highest that callers may ask for: above it, the model itself has suppressed boxes; 1 if it suppresses none."""
    labels: tuple[str, ...]
    source: str
    licence: str

    @cached_property
    def reference(self) -> str:
        """How the gateway refers to the model."""
        return refer_to(self.name, self.version) if self.is_pinned else self.name

    @cached_property
    def requested_names(self) -> tuple[str, ...]:
        """Names of the output tensors that are requested."""
        return (*self.output_names, DECODED) if self.tells_decoded else self.output_names

    @property
    def parallel_images(self) -> int:
        """How many images Triton can process at a time: a full batch in each instance."""
        return self.max_batch * self.instances

    @property
    def datatype(self) -> str:
        """Triton's name for the type of the input."""
        return _DATATYPES[self.dtype]

    @cached_property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of the input tensor of one image, without a batch dimension."""
        width, height = self.input_size
        return {InputFormat.HWC: (height, width, 3), InputFormat.CHW: (3, height, width), InputFormat.FILE: (1,)}[self.input_format]

    def batch_shape(self, images: int) -> tuple[int, ...]:
        """Shape of the input tensor of that many images, one after the other.

        Raises:
            ValueError: The model takes one image at a time.
        """
        if self.has_batch_dimension:
            return (images, *self.image_shape)
        if images != 1:
            raise ValueError(f"{self.name} has no batch dimension")
        return self.image_shape

    @cached_property
    def image_bytes(self) -> int:
        """Size of the input tensor of one image; for a model that takes files, of the largest that fits a slot."""
        return _MAX_SHARED_FILE_BYTES if self.dtype is None else math.prod(self.image_shape) * np.dtype(self.dtype).itemsize

    @property
    def input_is_canvas(self) -> bool:
        """Whether the canvas itself, UINT8 (height, width, 3) RGB, is the input tensor."""
        return self.input_format is InputFormat.HWC and self.dtype is np.uint8 and self.channels == "RGB"


def from_triton_config(config: dict[str, Any], version: str, *, is_pinned: bool = False) -> ModelSpec:
    """Derive the spec of a model.

    Args:
        config: The model's config as Triton's JSON.
        version: The version that will be used.
        is_pinned: Whether requests are to ask for it.

    Raises:
        UnsupportedModel: No adapter fits; the message names the tensors.
    """
    try:
        model = msgspec.convert(config, ModelConfig, strict=False)
        texts = {key: value.string_value for key, value in model.parameters.items()}
        hints = msgspec.convert(texts, ModelParameters, strict=False)
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"the config of {config.get('name')} has an invalid parameter: {error}") from error
    input_format, has_batch_dimension, input_size = _read_input(model, hints)
    has_written_batch = has_batch_dimension and model.max_batch_size == 0
    tells_decoded = input_format is InputFormat.FILE and any(tensor.name == DECODED for tensor in model.output)
    if tells_decoded:
        model.output = [tensor for tensor in model.output if tensor.name != DECODED]
    output_format, output_names = _read_outputs(model, 1 if has_written_batch else 0, count_anchors(input_size))
    types = {tensor.name: tensor.data_type for tensor in model.output}
    is_yolox = output_format is OutputFormat.YOLOX_HEAD
    iou = _DEFAULT_IOU if hints.iou is None else hints.iou
    # Rows of six come from networks trained to find each object once, unless their config tells of an NMS.
    suppresses = output_format is OutputFormat.END_TO_END or (output_format is OutputFormat.SIX_COLUMNS and hints.iou is not None)
    return ModelSpec(
        name=model.name,
        version=version,
        is_pinned=is_pinned,
        backend=model.backend or model.platform,
        max_batch=max(1, model.max_batch_size),
        instances=max(
            1, sum(group.count * max(1, len(group.gpus)) for group in model.instance_group), len(model.ensemble_scheduling.step)
        ),
        device="gpu" if any(group.kind == "KIND_GPU" for group in model.instance_group) else hints.device,
        input_name=model.input[0].name,
        dtype=None if input_format is InputFormat.FILE else _DTYPES[model.input[0].data_type],
        input_format=input_format,
        has_batch_dimension=has_batch_dimension,
        input_size=input_size,
        output_names=output_names,
        output_dtypes=tuple(_OUTPUT_DTYPES.get(types[name]) for name in output_names),
        output_format=output_format,
        tells_decoded=tells_decoded,
        placement=hints.placement or ("top_left" if is_yolox else "center"),
        enlarge=hints.enlarge,
        pad=hints.pad,
        channels=hints.channels or ("BGR" if is_yolox else "RGB"),
        scale=hints.scale or (1.0 if is_yolox else 255.0),
        has_normalized_boxes=hints.box_units == "normalized",
        iou=iou,
        max_iou=iou if suppresses else 1.0,
        labels=hints.class_names(),
        source=hints.source,
        licence=hints.licence,
    )


def _read_input(model: ModelConfig, hints: ModelParameters) -> tuple[InputFormat, bool, tuple[int, int]]:
    """Find the input format, whether it has a batch dimension, and the input's width and height."""
    if len(model.input) != 1:
        raise _unsupported(model)
    tensor = model.input[0]
    dims, has_batch_dimension = tensor.dims, model.max_batch_size > 0
    side = hints.side()
    if tensor.data_type == _BYTES and dims in ([1], [-1]):
        if side is None:
            raise UnsupportedModel(f"{model.name} takes the encoded file; its config must say `square`, the side of its input")
        return InputFormat.FILE, has_batch_dimension, (side, side)
    if len(dims) == 4 and not has_batch_dimension:  # noqa: PLR2004 - the batch dimension is written out
        dims, has_batch_dimension = dims[1:], True
    if tensor.data_type not in _DTYPES or len(dims) != 3 or 3 not in (dims[0], dims[2]):  # noqa: PLR2004
        raise _unsupported(model)
    input_format = InputFormat.CHW if dims[0] == 3 else InputFormat.HWC  # noqa: PLR2004
    height, width = dims[1:] if input_format is InputFormat.CHW else dims[:2]
    fallback = side or _DEFAULT_SIDE
    return input_format, has_batch_dimension, (width if width > 0 else fallback, height if height > 0 else fallback)


def _read_outputs(model: ModelConfig, batch_dims: int, anchors: int) -> tuple[OutputFormat, tuple[str, ...]]:
    """Find the output format and the names of its tensors, whose first `batch_dims` dimensions are the batch."""
    shapes = {tensor.name: tensor.dims[batch_dims:] for tensor in model.output if tensor.data_type != _BYTES}
    if len(shapes) == 4:  # noqa: PLR2004
        return OutputFormat.END_TO_END, _identify_four(model, shapes)
    if len(shapes) == 1:
        ((name, dims),) = shapes.items()
        match dims:
            case [rows, columns] if rows == anchors and columns > 5:  # noqa: PLR2004
                return OutputFormat.YOLOX_HEAD, (name,)
            case [_, 6]:
                return OutputFormat.SIX_COLUMNS, (name,)
            case [channels, columns] if channels > 4 and (columns == -1 or columns > channels):  # noqa: PLR2004
                return OutputFormat.YOLO_HEAD, (name,)
    raise _unsupported(model)


def _identify_four(model: ModelConfig, shapes: dict[str, list[int]]) -> tuple[str, ...]:
    """Name count, boxes, scores and classes of a model with four outputs."""
    types = {tensor.name: tensor.data_type for tensor in model.output}
    boxes = [name for name, dims in shapes.items() if len(dims) == 2 and dims[1] == 4]  # noqa: PLR2004
    counts = [name for name, dims in shapes.items() if dims == [1] and "INT" in types[name]]
    rest = [name for name in shapes if name not in boxes + counts and len(shapes[name]) == 1]
    classes = [name for name in rest if "INT" in types[name]] or [n for n in rest if "class" in n.lower() or "label" in n.lower()]
    scores = [name for name in rest if name not in classes and "FP" in types[name]]
    if not len(boxes) == len(counts) == len(scores) == len(classes) == 1:
        raise _unsupported(model)
    return counts[0], boxes[0], scores[0], classes[0]


def _unsupported(model: ModelConfig) -> UnsupportedModel:
    def describe(tensors: list[TensorConfig]) -> str:
        return ", ".join(f"{t.name} {t.data_type.removeprefix('TYPE_')} {t.dims}" for t in tensors) or "none"

    return UnsupportedModel(f"no adapter fits {model.name}: inputs {describe(model.input)}; outputs {describe(model.output)}")
