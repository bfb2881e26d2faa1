"""What the gateway must know of a model, all of it read from the model's Triton config.

Layouts are told apart by the names, types and shapes in the config, and by its `parameters`
(app/model_config.py lists them); never by looking at values.
"""

import math
from enum import Enum
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from app import nms
from app.errors import UnsupportedLayout
from app.model_config import Hints, ModelConfig, TensorConfig

_DTYPES: dict[str, type[np.generic]] = {"TYPE_UINT8": np.uint8, "TYPE_FP32": np.float32, "TYPE_FP16": np.float16}
_BYTES = "TYPE_STRING"
_DEFAULT_SQUARE = 640
# Larger files are rare, and travel inside the request.
_FILE_BYTES = 1 << 20


class Form(Enum):
    """How the picture is handed to the model."""

    HWC = "height, width, channel"
    CHW = "channel, height, width"
    FILE = "the file itself"


class Layout(Enum):
    """How detections come out of it."""

    END_TO_END = "count, boxes, scores and classes in four tensors"
    SIX_COLUMNS = "rows of x1 y1 x2 y2 score class"
    YOLO_HEAD = "raw head (4 + classes, anchors)"
    YOLOX_HEAD = "raw head (anchors, 5 + classes)"


class Contract(msgspec.Struct, frozen=True, kw_only=True):
    """One model, as the gateway sees it."""

    name: str
    version: str
    backend: str
    device: Literal["cpu", "gpu"]
    input: str
    dtype: type[np.generic] | None
    """None for a model that takes the file."""
    form: Form
    batched: bool
    """Whether tensors have a batch dimension in front."""
    frame: tuple[int, int]
    """Width and height of the model's picture, pixels."""
    outputs: tuple[str, ...]
    """For END_TO_END in the order of its description."""
    layout: Layout
    centred: bool
    enlarge: bool
    pad: int
    channels: Literal["RGB", "BGR"]
    scale: float
    normalized: bool
    iou: float
    labels: tuple[str, ...]
    source: str
    licence: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the input tensor for one picture, with its batch dimension where there is one."""
        width, height = self.frame
        picture = {Form.HWC: (height, width, 3), Form.CHW: (3, height, width), Form.FILE: (1,)}[self.form]
        return (1, *picture) if self.batched else picture

    @property
    def input_bytes(self) -> int:
        """Size of that tensor; of a file, the largest that has slots in shared memory."""
        return _FILE_BYTES if self.dtype is None else math.prod(self.shape) * np.dtype(self.dtype).itemsize

    @property
    def is_frame(self) -> bool:
        """Whether the frame itself, UINT8 (height, width, 3) RGB, is the input tensor."""
        return self.form is Form.HWC and self.dtype is np.uint8 and self.channels == "RGB"

    def fill(self, tensor: NDArray[Any], frame: NDArray[np.uint8]) -> None:
        """Write a frame, UINT8 (height, width, 3) RGB, into the input tensor as the model wants it."""
        pixels = frame[:, :, ::-1] if self.channels == "BGR" else frame
        if self.form is Form.CHW:
            pixels = pixels.transpose(2, 0, 1)
        if self.dtype is np.uint8:
            tensor[:] = pixels
        else:
            tensor[:] = np.divide(pixels, self.scale, dtype=np.float32)


def read(config: dict[str, Any], version: str) -> Contract:
    """Derive the contract of a model.

    Args:
        config: The model's config as Triton's JSON.
        version: The version that will be asked.

    Raises:
        UnsupportedLayout: No adapter fits; the message names the tensors.
    """
    try:
        model = msgspec.convert(config, ModelConfig, strict=False)
        texts = {key: text.string_value for key, text in model.parameters.items()}
        hints = msgspec.convert(texts, Hints, strict=False)
    except msgspec.ValidationError as error:
        raise UnsupportedLayout(f"the config of {config.get('name')} has a parameter that is not valid: {error}") from error
    form, batched, frame = _input(model, hints)
    layout, outputs = _output(model, batched=batched, anchors=len(nms.cells(frame)[0]))
    is_yolox = layout is Layout.YOLOX_HEAD
    return Contract(
        name=model.name,
        version=version,
        backend=model.backend or model.platform,
        device="gpu" if any(group.kind == "KIND_GPU" for group in model.instance_group) else "cpu",
        input=model.input[0].name,
        dtype=None if form is Form.FILE else _DTYPES[model.input[0].data_type],
        form=form,
        batched=batched,
        frame=frame,
        outputs=outputs,
        layout=layout,
        centred=(hints.placement or ("top_left" if is_yolox else "center")) == "center",
        enlarge=hints.enlarge,
        pad=hints.pad,
        channels=hints.channels or ("BGR" if is_yolox else "RGB"),
        scale=hints.scale or (1.0 if is_yolox else 255.0),
        normalized=hints.box_units == "normalized",
        iou=hints.iou,
        labels=hints.class_names(),
        source=hints.source,
        licence=hints.licence,
    )


def _input(model: ModelConfig, hints: Hints) -> tuple[Form, bool, tuple[int, int]]:
    """Find the form of the input, whether it is batched, and the frame."""
    if len(model.input) != 1:
        raise _unknown(model)
    tensor = model.input[0]
    dims, batched = tensor.dims, model.max_batch_size > 0
    square = hints.side()
    if tensor.data_type == _BYTES and dims in ([1], [-1]):
        if square is None:
            raise UnsupportedLayout(f"{model.name} takes the file itself; its config must say `square`, the side of its frame")
        return Form.FILE, batched, (square, square)
    if len(dims) == 4 and not batched:  # noqa: PLR2004 - the batch dimension is written out
        dims, batched = dims[1:], True
    if tensor.data_type not in _DTYPES or len(dims) != 3 or 3 not in (dims[0], dims[2]):  # noqa: PLR2004
        raise _unknown(model)
    form = Form.CHW if dims[0] == 3 else Form.HWC  # noqa: PLR2004
    height, width = dims[1:] if form is Form.CHW else dims[:2]
    fallback = square or _DEFAULT_SQUARE
    return form, batched, (width if width > 0 else fallback, height if height > 0 else fallback)


def _output(model: ModelConfig, *, batched: bool, anchors: int) -> tuple[Layout, tuple[str, ...]]:
    """Find the layout of the outputs and their names."""
    skip = 1 if batched and model.max_batch_size == 0 else 0
    shapes = {tensor.name: tensor.dims[skip:] for tensor in model.output if tensor.data_type != _BYTES}
    if len(shapes) == 4:  # noqa: PLR2004
        return Layout.END_TO_END, _four(model, shapes)
    if len(shapes) == 1:
        ((name, dims),) = shapes.items()
        match dims:
            case [rows, columns] if rows == anchors and columns > 5:  # noqa: PLR2004
                return Layout.YOLOX_HEAD, (name,)
            case [_, 6]:
                return Layout.SIX_COLUMNS, (name,)
            case [channels, columns] if channels > 4 and (columns == -1 or columns > channels):  # noqa: PLR2004
                return Layout.YOLO_HEAD, (name,)
    raise _unknown(model)


def _four(model: ModelConfig, shapes: dict[str, list[int]]) -> tuple[str, ...]:
    """Name count, boxes, scores and classes of a four-tensor model."""
    types = {tensor.name: tensor.data_type for tensor in model.output}
    boxes = [name for name, dims in shapes.items() if len(dims) == 2 and dims[1] == 4]  # noqa: PLR2004
    counts = [name for name, dims in shapes.items() if dims == [1] and "INT" in types[name]]
    rest = [name for name in shapes if name not in boxes + counts and len(shapes[name]) == 1]
    classes = [name for name in rest if "INT" in types[name]] or [n for n in rest if "class" in n.lower() or "label" in n.lower()]
    scores = [name for name in rest if name not in classes and "FP" in types[name]]
    if not len(boxes) == len(counts) == len(scores) == len(classes) == 1:
        raise _unknown(model)
    return counts[0], boxes[0], scores[0], classes[0]


def _unknown(model: ModelConfig) -> UnsupportedLayout:
    def described(tensors: list[TensorConfig]) -> str:
        return ", ".join(f"{t.name} {t.data_type.removeprefix('TYPE_')} {t.dims}" for t in tensors) or "none"

    return UnsupportedLayout(f"no adapter fits {model.name}: inputs {described(model.input)}; outputs {described(model.output)}")
