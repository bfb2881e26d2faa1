"""What the gateway must know of a model, all of it read from the model's Triton config.

Layouts are told apart by the names, types and shapes in the config, and by its `parameters`; never
by looking at values. What `parameters` may hold, with the default where it is missing:

    labels      class names, comma separated (else the `names` of Ultralytics' `metadata`, else the ids)
    placement   center | top_left   where the picture lies in the frame (top_left for a YOLOX head)
    enlarge     true | false        whether small pictures grow to the frame (true)
    pad         0 to 255            the value around the picture (114)
    channels    RGB | BGR           (BGR for a YOLOX head)
    scale       float               what a byte is divided by for a float input (255; 1 for a YOLOX head)
    square      pixels              side of the frame, where the input's shape does not say (`imgsz`, else 640)
    box_units   pixels | normalized of the frame, for boxes that come out (pixels)
    iou         0 to 1              overlap above which two boxes of a class are one, for raw heads (0.7)
    source, licence                 told by /models
"""

import ast
from enum import Enum
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from app import nms
from app.errors import UnsupportedLayout

_DTYPES: dict[str, type[np.generic]] = {"TYPE_UINT8": np.uint8, "TYPE_FP32": np.float32, "TYPE_FP16": np.float16}
_BYTES = "TYPE_STRING"
_DEFAULT_SQUARE = 640


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

    def to_input(self, pixels: NDArray[np.uint8]) -> NDArray[Any]:
        """Turn a frame, UINT8 (height, width, 3) RGB, into the model's input tensor, copied only where it must be."""
        if self.channels == "BGR":
            pixels = pixels[:, :, ::-1]
        if self.form is Form.CHW:
            pixels = pixels.transpose(2, 0, 1)
        tensor: NDArray[Any] = pixels
        if self.dtype is not np.uint8:
            tensor = np.divide(pixels, self.scale, dtype=np.float32).astype(self.dtype, copy=False)
        return np.ascontiguousarray(tensor)[None] if self.batched else np.ascontiguousarray(tensor)


class _Tensor(msgspec.Struct):
    name: str
    data_type: str
    dims: list[int]


class _Group(msgspec.Struct):
    kind: str = "KIND_AUTO"


class _Text(msgspec.Struct):
    string_value: str = ""


class _Config(msgspec.Struct):
    """The part of Triton's ModelConfig that is read here, as its JSON has it."""

    name: str
    backend: str = ""
    platform: str = ""
    max_batch_size: int = 0
    input: list[_Tensor] = []
    output: list[_Tensor] = []
    instance_group: list[_Group] = []
    parameters: dict[str, _Text] = {}


class _Parameters(msgspec.Struct):
    labels: str = ""
    placement: Literal["center", "top_left"] | None = None
    enlarge: bool = True
    pad: Annotated[int, Meta(ge=0, le=255)] = 114
    channels: Literal["RGB", "BGR"] | None = None
    scale: Annotated[float, Meta(gt=0, le=65535)] | None = None
    square: Annotated[int, Meta(ge=32, le=8192)] | None = None
    box_units: Literal["pixels", "normalized"] = "pixels"
    iou: Annotated[float, Meta(ge=0, le=1)] = 0.7
    source: str = ""
    licence: str = ""
    metadata: str = ""


def read(config: dict[str, Any], version: str) -> Contract:
    """Derive the contract of a model.

    Args:
        config: The model's config as Triton's JSON.
        version: The version that will be asked.

    Raises:
        UnsupportedLayout: No adapter fits; the message names the tensors.
    """
    try:
        model = msgspec.convert(config, _Config, strict=False)
        texts = {key: text.string_value for key, text in model.parameters.items()}
        given = msgspec.convert(texts, _Parameters, strict=False)
    except msgspec.ValidationError as error:
        raise UnsupportedLayout(f"the config of {config.get('name')} has a parameter that is not valid: {error}") from error
    exported = _ultralytics(given.metadata)
    form, batched, frame = _input(model, given, exported)
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
        centred=(given.placement or ("top_left" if is_yolox else "center")) == "center",
        enlarge=given.enlarge,
        pad=given.pad,
        channels=given.channels or ("BGR" if is_yolox else "RGB"),
        scale=given.scale or (1.0 if is_yolox else 255.0),
        normalized=given.box_units == "normalized",
        iou=given.iou,
        labels=tuple(label.strip() for label in given.labels.split(",")) if given.labels else _names(exported),
        source=given.source,
        licence=given.licence,
    )


def _input(model: _Config, given: _Parameters, exported: dict[str, Any]) -> tuple[Form, bool, tuple[int, int]]:
    """Find the form of the input, whether it is batched, and the frame."""
    if len(model.input) != 1:
        raise _unknown(model)
    tensor = model.input[0]
    dims, batched = tensor.dims, model.max_batch_size > 0
    square = given.square or _imgsz(exported)
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


def _output(model: _Config, *, batched: bool, anchors: int) -> tuple[Layout, tuple[str, ...]]:
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


def _four(model: _Config, shapes: dict[str, list[int]]) -> tuple[str, ...]:
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


def _ultralytics(metadata: str) -> dict[str, Any]:
    """Read what Ultralytics' exporter writes: a Python dict as text."""
    try:
        value = ast.literal_eval(metadata) if metadata else {}
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # all that literal_eval is known to raise
        return {}
    return value if isinstance(value, dict) else {}


def _imgsz(exported: dict[str, Any]) -> int | None:
    size = exported.get("imgsz")
    if isinstance(size, list | tuple) and size:
        size = size[0]
    return size if isinstance(size, int) and size > 0 else None


def _names(exported: dict[str, Any]) -> tuple[str, ...]:
    names = exported.get("names")
    if not isinstance(names, dict) or names.keys() != set(range(len(names))):
        return ()
    return tuple(str(names[index]) for index in range(len(names)))


def _unknown(model: _Config) -> UnsupportedLayout:
    def described(tensors: list[_Tensor]) -> str:
        return ", ".join(f"{t.name} {t.data_type.removeprefix('TYPE_')} {t.dims}" for t in tensors) or "none"

    return UnsupportedLayout(f"no adapter fits {model.name}: inputs {described(model.input)}; outputs {described(model.output)}")
