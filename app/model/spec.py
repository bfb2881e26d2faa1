"""Specs of models, derived from their Triton configs; `docs/how-to/model-config.md` lists the `parameters` in these."""

import math
from enum import Enum
from functools import cached_property
from hashlib import blake2b
from typing import Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from app.errors import UnsupportedModel, WrongTask
from app.model.golden import SAMPLE
from app.model.heads import DetectionHead, Head, HeadType, OutputFormat, read_head, unsupported
from app.model.reference import refer_to
from app.model.triton_config import BYTES, ModelConfig, ModelParameters, Placement, PlainParameters, Resize, read_parameters

_DTYPES: dict[str, type[np.generic]] = {"TYPE_UINT8": np.uint8, "TYPE_FP32": np.float32, "TYPE_FP16": np.float16}
_DATATYPES: dict[type[np.generic] | None, str] = {np.uint8: "UINT8", np.float16: "FP16", np.float32: "FP32", None: "BYTES"}
OUTPUT_DTYPES = {
    **{f"FP{bits}": np.dtype(f"f{bits // 8}") for bits in (16, 32, 64)},
    **{f"INT{bits}": np.dtype(f"i{bits // 8}") for bits in (8, 16, 32, 64)},
    **{f"UINT{bits}": np.dtype(f"u{bits // 8}") for bits in (8, 16, 32, 64)},
    "BOOL": np.dtype(bool),
}
"""Types of output tensors by Triton's names."""
DECODED = "decoded"
"""Name of the output in which a model that takes files reports whether it decoded the file: one number per image."""
_DEFAULT_SIZE = (640, 640)
# Of the input for text: the shorter side at least, and both sides at most.
_TEXT_SIDE, _MAX_TEXT_SIDE = 736, 2048
# 224 of 256 pixels, the usual preprocessing for ImageNet.
_CROP = 0.875
# What changes neither the pixels of the input nor the outputs that requests get.
_INSIGNIFICANT = ("source", "licence", "default_version", "golden", "gives_sample", "unchecked", "box_units", "doubt")
# Larger files are rare; they are sent inline in the request.
_MAX_SHARED_FILE_BYTES = 1 << 20


class InputFormat(Enum):
    """Format of the model's input."""

    HWC = "height, width, channel"
    CHW = "channel, height, width"
    FILE = "the encoded file"


class ModelSpec(PlainParameters, frozen=True, kw_only=True, dict=True):  # `dict` for cached properties
    """The properties of one model."""

    name: str
    version: str
    is_pinned: bool = False
    """Whether calls to Triton name this version; otherwise Triton chooses, and may meanwhile choose a newer one."""
    backend: str
    """Triton's backend, such as `onnxruntime`, or `ensemble`."""
    device: Literal["cpu", "gpu"]
    max_batch: int
    """Maximum number of images per call."""
    instances: int
    """Number of batches that Triton processes in parallel; for an ensemble, at least the number of its steps."""
    priority_levels: int = 0
    """Number of priorities in Triton's queue of the model; 0 if it is in order of arrival."""
    input_name: str
    dtype: type[np.generic] | None
    """Type of the input; None for a model that takes the encoded file."""
    input_format: InputFormat
    has_batch_dimension: bool
    input_size: tuple[int, int]
    """Width and height of the model's input, in pixels; the largest ones if they follow the image's size."""
    shapes: tuple[tuple[int, int], ...] = ()
    """Width and height of smaller inputs, ascending, of which an image gets the first that holds it; none if all get the same."""
    min_side: int = 0
    """Minimum of the shorter side of an input for text, in pixels."""
    output_names: tuple[str, ...]
    """Names of the head's output tensors; for detections, in the order of the format's description."""
    output_dtypes: tuple[np.dtype[Any] | None, ...]
    """Types of these tensors; None if the type is not checked."""
    head: Head
    tells_decoded: bool
    """Whether the model also has the output `DECODED`."""
    gives_sample: bool = False
    """Whether the model also has the output `SAMPLE`."""
    box_units: Literal["pixels", "normalized"] | None = "pixels"
    """Unit of a detector's boxes; None if nothing tells it, and pixels are assumed."""
    doubt: str = ""
    """Why the rows that the model gave when it was loaded are not of its head; empty if they may be."""
    resize: Resize
    placement: Placement
    crop: float
    """Fraction of the image's shorter side that a centre crop keeps."""
    channels: Literal["RGB", "BGR"]
    scale: float
    """For a float input: each byte is divided by this."""
    labels: tuple[str, ...]

    def expect_head(self, kind: type[HeadType]) -> HeadType:
        """Return the head; raise `WrongTask` if it has another task."""
        own = self.head
        if own.task == kind.task and isinstance(own, kind):
            return own
        alone = "" if own.task.startswith("text_") else f" or /predict/{self.name}"
        raise WrongTask(f"{self.name} is a {own.noun}, not a {kind.noun}; POST {own.route}{alone} asks it")

    @property
    def is_checked(self) -> bool | None:
        """Whether `add` has seen the version find something; None for a model that was not added."""
        return self.version not in self.unchecked.split(",") if self.golden else None

    @cached_property
    def meaning(self) -> bytes:
        """Hash of all properties but those that change neither the pixels of the input nor the meaning of the outputs."""
        others = {"is_pinned", "max_batch", "instances", "priority_levels", *_INSIGNIFICANT}
        facts = [(name, value) for name, value in msgspec.structs.asdict(self).items() if name not in others]
        return blake2b(repr(facts).encode()).digest()

    def class_name(self, class_id: int) -> str:
        """Return the label of a class, or its id if it has no label."""
        return self.labels[class_id] if class_id < len(self.labels) else str(class_id)

    @cached_property
    def reference(self) -> str:
        """The reference of the model."""
        return refer_to(self.name, self.version) if self.is_pinned else self.name

    @cached_property
    def pinned(self) -> "ModelSpec":
        """The same model with `is_pinned` set."""
        return self if self.is_pinned else msgspec.structs.replace(self, is_pinned=True)

    @cached_property
    def requested_names(self) -> tuple[str, ...]:
        """Names of the output tensors to request."""
        return (*self.output_names, DECODED) if self.tells_decoded else self.output_names

    @cached_property
    def parallel_images(self) -> int:
        """Number of images that Triton processes in parallel: a full batch per instance."""
        return self.max_batch * self.instances

    @cached_property
    def datatype(self) -> str:
        """Triton's name of the input type."""
        return _DATATYPES[self.dtype]

    @cached_property
    def image_shape(self) -> tuple[int, ...]:
        """Shape of the input tensor of one image, without the batch dimension."""
        return (1,) if self.input_format is InputFormat.FILE else self.shape_of(self.input_size)

    @cached_property
    def is_sized_by_image(self) -> bool:
        """Whether the size of the input follows that of the image: then only images of the same size share a batch."""
        return self.resize in {"text", "line"} or bool(self.shapes)

    def shape_of(self, canvas_size: tuple[int, int]) -> tuple[int, ...]:
        """Shape of the input tensor of one image whose canvas has this width and height."""
        width, height = canvas_size
        return (3, height, width) if self.input_format is InputFormat.CHW else (height, width, 3)

    def batch_shape(self, images: int, image_shape: tuple[int, ...] | None = None) -> tuple[int, ...]:
        """Shape of the input tensor of several images; raises ValueError if the model takes one at a time."""
        if image_shape is None or self.dtype is None:
            image_shape = self.image_shape
        if self.has_batch_dimension:
            return (images, *image_shape)
        if images != 1:
            raise ValueError(f"{self.name} has no batch dimension")
        return image_shape

    @cached_property
    def image_bytes(self) -> int:
        """Size of the input tensor of one image; for a model that takes files, the maximum size of a file in a slot."""
        return _MAX_SHARED_FILE_BYTES if self.dtype is None else math.prod(self.image_shape) * np.dtype(self.dtype).itemsize

    @cached_property
    def normalization(self) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Offset to subtract from each byte of a float input, and divisor of the result; FP32 of shape (3, 1, 1), (3,) or ()."""
        scale, mean, std = np.float64(self.scale), np.array(self.mean), np.array(self.std)
        if len({*zip(self.mean, self.std, strict=True)}) == 1:
            mean, std = mean[0], std[0]
        elif self.input_format is InputFormat.CHW:
            mean, std = mean[:, None, None], std[:, None, None]
        return np.asarray(mean * scale, np.float32), np.asarray(std * scale, np.float32)

    @cached_property
    def input_is_canvas(self) -> bool:
        """Whether the canvas itself, UINT8 (height, width, 3) RGB, is the input tensor."""
        return self.input_format is InputFormat.HWC and self.dtype is np.uint8 and self.channels == "RGB"


def from_triton_config(config: dict[str, Any], version: str, *, is_pinned: bool = False) -> ModelSpec:
    """Derive the spec of a model's version from its config, as Triton's JSON; raises UnsupportedModel, which names the tensors."""
    try:
        model = msgspec.convert(config, ModelConfig, strict=False)
        hints = read_parameters(model)
    except msgspec.ValidationError as error:
        raise UnsupportedModel(f"the config of {config.get('name')} has an invalid parameter: {error}") from error
    input_format, has_batch_dimension, input_size = _read_input(model, hints)
    has_written_batch = has_batch_dimension and model.max_batch_size == 0
    tells_decoded = input_format is InputFormat.FILE and any(tensor.name == DECODED for tensor in model.output)
    if tells_decoded:
        model.output = [tensor for tensor in model.output if tensor.name != DECODED]
    gives_sample = any(tensor.name == SAMPLE for tensor in model.output)
    model.output = [tensor for tensor in model.output if tensor.name != SAMPLE]
    head, output_names = read_head(model, hints, 1 if has_written_batch else 0, input_size)
    types = {tensor.name: tensor.data_type for tensor in model.output}
    defaults = head.input_defaults
    resize = hints.resize or defaults.resize
    if resize == "text":
        input_size = _MAX_TEXT_SIDE, _MAX_TEXT_SIDE
    elif resize == "line":
        input_size = hints.widths[-1], input_size[1]
    steps = len(model.ensemble_scheduling.step) if model.ensemble_scheduling else 0
    return ModelSpec(
        name=model.name,
        version=version,
        is_pinned=is_pinned,
        backend=model.backend or model.platform,
        max_batch=max(1, model.max_batch_size),
        instances=max(1, steps, sum(group.count * max(1, len(group.gpus)) for group in model.instance_group)),
        priority_levels=model.dynamic_batching.priority_levels if model.dynamic_batching else 0,
        device="gpu" if any(group.kind == "KIND_GPU" for group in model.instance_group) else hints.device,
        input_name=model.input[0].name,
        dtype=None if input_format is InputFormat.FILE else _DTYPES[model.input[0].data_type],
        input_format=input_format,
        has_batch_dimension=has_batch_dimension,
        input_size=input_size,
        shapes=_read_shapes(model, hints, head, resize),
        min_side=(hints.square or _TEXT_SIDE) if resize == "text" else 0,
        output_names=output_names,
        output_dtypes=tuple(OUTPUT_DTYPES.get(types[name].removeprefix("TYPE_")) for name in output_names),
        head=head,
        tells_decoded=tells_decoded,
        gives_sample=gives_sample,
        box_units=_read_units(head, hints),
        resize=resize,
        placement=hints.placement or defaults.placement,
        crop=hints.crop or (1.0 if hints.is_ultralytics_classifier else _CROP),
        channels=hints.channels or defaults.channels,
        scale=hints.scale or defaults.scale,
        labels=hints.class_names(),
        **{name: getattr(hints, name) for name in PlainParameters.__struct_fields__},
    )


def _read_shapes(model: ModelConfig, hints: ModelParameters, head: Head, resize: Resize) -> tuple[tuple[int, int], ...]:
    # Boxes in cells or fractions would be those of one size.
    is_fit = isinstance(head, DetectionHead) and head.output_format is not OutputFormat.YOLOX_HEAD and resize == "letterbox"
    is_dynamic = model.input[0].dims[-3:].count(-1) > 1
    return tuple(sorted(hints.shapes, key=math.prod)) if is_fit and is_dynamic and _read_units(head, hints) != "normalized" else ()


def _read_units(head: Head, hints: ModelParameters) -> Literal["pixels", "normalized"] | None:
    if isinstance(head, DetectionHead) and head.has_normalized_boxes:
        return "normalized"
    # The models that `add` composes have pixels.
    is_known = type(head) is not DetectionHead or hints.golden
    return "pixels" if is_known else hints.box_units


def _read_input(model: ModelConfig, hints: ModelParameters) -> tuple[InputFormat, bool, tuple[int, int]]:
    if model.sequence_batching is not None:
        text = f"{model.name} takes sequences only, as its config says with `sequence_batching`"
        raise UnsupportedModel(text, answers_nothing=True)
    if len(model.input) != 1:
        raise unsupported(model)
    tensor = model.input[0]
    dims, has_batch_dimension = tensor.dims, model.max_batch_size > 0
    size = hints.input_size()
    if tensor.data_type == BYTES and dims in ([1], [-1]):
        if size is None:
            raise UnsupportedModel(f"{model.name} takes the encoded file; its config must say `square`, the side of its input")
        return InputFormat.FILE, has_batch_dimension, size
    if len(dims) == 4 and not has_batch_dimension:  # noqa: PLR2004 - explicit batch dimension
        if dims[0] > 1:
            text = f"{model.name} takes only batches of {dims[0]} images; export it again with a dynamic batch"
            raise UnsupportedModel(text, answers_nothing=True)
        dims, has_batch_dimension = dims[1:], True
    if tensor.data_type not in _DTYPES or len(dims) != 3 or 3 not in (dims[0], dims[2]):  # noqa: PLR2004
        raise unsupported(model)
    input_format = InputFormat.CHW if dims[0] == 3 else InputFormat.HWC  # noqa: PLR2004
    height, width = dims[1:] if input_format is InputFormat.CHW else dims[:2]
    default_width, default_height = size or _DEFAULT_SIZE
    return input_format, has_batch_dimension, (width if width > 0 else default_width, height if height > 0 else default_height)


def are_interchangeable(one: ModelSpec, other: ModelSpec) -> bool:
    """Return whether two models have the same inputs and outputs; version, device, speed, origin and file formats may differ."""
    speed = ("device", "max_batch", "instances", "priority_levels")
    may_differ = (*speed, *_INSIGNIFICANT, "version", "formats")
    return one == msgspec.structs.replace(other, **{name: getattr(one, name) for name in may_differ})
