"""The parts of a model's Triton config that the gateway reads."""

from functools import lru_cache
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from app.model.names import order_names, read_literal
from app.model.shapes import rectangles

Placement = Literal["center", "top_left"]
Resize = Literal["letterbox", "center_crop", "stretch", "text", "line"]
"""How images are fitted to the model's input: with padding, with the longer side cropped, with each axis scaled separately; or to
an input whose size follows that of the image, of a page or of a line of text."""
Interpolation = Literal["bilinear", "bicubic"]
"""Interpolation between the nearest 4 or 16 pixels."""
ScoreKind = Literal["logits", "probabilities"]
HeadName = Literal["yolo", "yolov5", "yolox", "deepstream", "end_to_end", "rtdetr"]
_TASKS = {"detect": "detection", "classify": "classification", "segment": "segmentation"}
"""Tasks by Ultralytics' names, where these differ."""
BYTES = "TYPE_STRING"
"""Triton's type of tensors that contain texts or files."""

_Side = Annotated[int, Meta(ge=32, le=8192)]
_ChannelValue = Annotated[float, Meta(ge=-1e6, le=1e6)]
_ChannelDivisor = Annotated[float, Meta(gt=0, le=1e6)]


class TensorConfig(msgspec.Struct):
    """An input or output; `dims` without the batch dimension that `max_batch_size` implies."""

    name: str
    data_type: str
    dims: list[int]
    label_filename: str = ""


class InstanceGroup(msgspec.Struct):
    """A group of instances on the same kind of device."""

    kind: str = "KIND_AUTO"
    count: int = 1
    gpus: list[int] = []


class ParameterValue(msgspec.Struct):
    """The value of a parameter."""

    string_value: str = ""


class Ensemble(msgspec.Struct, frozen=True):
    """The steps of an ensemble."""

    step: list[dict[str, Any]] = []


class QueuePolicy(msgspec.Struct, frozen=True):
    """Triton's policy for waiting requests."""

    timeout_action: str = "REJECT"
    default_timeout_microseconds: int = 0
    allow_timeout_override: bool = False
    max_queue_size: int = 0


class DynamicBatching(msgspec.Struct, frozen=True):
    """How Triton queues calls, and joins them to batches."""

    preferred_batch_size: list[int] = []
    max_queue_delay_microseconds: int = 0
    priority_levels: int = 0
    default_queue_policy: QueuePolicy = QueuePolicy()


class ModelConfig(msgspec.Struct):
    """Triton's ModelConfig in its JSON form, which omits zeros."""

    name: str
    backend: str = ""
    platform: str = ""
    max_batch_size: int = 0
    input: list[TensorConfig] = []
    output: list[TensorConfig] = []
    instance_group: list[InstanceGroup] = []
    ensemble_scheduling: Ensemble | None = None
    sequence_batching: dict[str, Any] | None = None
    dynamic_batching: DynamicBatching | None = None
    parameters: dict[str, ParameterValue] = {}


class PlainParameters(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters that a model's spec takes over as they are."""

    enlarge: bool = True
    pad: Annotated[int, Meta(ge=0, le=255)] = 114
    interpolation: Interpolation = "bilinear"
    mean: tuple[_ChannelValue, _ChannelValue, _ChannelValue] = (0.0, 0.0, 0.0)
    std: tuple[_ChannelDivisor, _ChannelDivisor, _ChannelDivisor] = (1.0, 1.0, 1.0)
    source: str = ""
    licence: str = ""
    default_version: Annotated[int, Meta(ge=1)] | None = None
    formats: Annotated[str, Meta(pattern=r"^([A-Z]+(, ?[A-Z]+)*)?$")] = ""
    widths: tuple[_Side, ...] = (160, 320, 480, 640, 960, 1280)
    landmarks: tuple[Annotated[float, Meta(ge=0, le=1)], ...] = ()
    match_distance: Annotated[float, Meta(gt=0)] | None = None
    golden: str = ""
    unchecked: str = ""


class ModelParameters(PlainParameters, frozen=True, kw_only=True):
    """The validated parameters of a config, as `docs/how-to/model-config.md` lists them."""

    labels: str = ""
    resize: Resize | None = None
    placement: Placement | None = None
    crop: Annotated[float, Meta(gt=0, le=1)] | None = None
    channels: Literal["RGB", "BGR"] | None = None
    scale: Annotated[float, Meta(gt=0, le=65535)] | None = None
    square: _Side | None = None
    shapes: tuple[tuple[_Side, _Side], ...] = ()
    head: HeadName | None = None
    box_units: Literal["pixels", "normalized"] | None = None
    scores: ScoreKind | None = None
    iou: Annotated[float, Meta(ge=0, le=1)] | None = None
    device: Literal["cpu", "gpu"] = "cpu"
    metadata: str = ""
    keypoints: str = ""
    named_task: str | None = msgspec.field(default=None, name="task")

    def __post_init__(self) -> None:
        _split(self.labels, "labels")
        _split(self.keypoints, "keypoints")

    def class_names(self) -> tuple[str, ...]:
        """Return the class names in the order of their ids; empty if the config has none."""
        if labels := _split(self.labels, "labels"):
            return labels if self.task == "text_recognition" else tuple(map(str.strip, labels))  # a space is a character
        return order_names(self._exporter_metadata().get("names"))

    @property
    def task(self) -> object:
        """The task, by Nereid's name if Ultralytics' is known; None if the config has none."""
        task = self._exporter_metadata().get("task")
        return self.named_task or _TASKS.get(f"{task}", task)

    @property
    def is_ultralytics_classifier(self) -> bool:
        """Whether `metadata` names the task `classify`. These models return probabilities and are trained on uncropped squares."""
        return self._exporter_metadata().get("task") == "classify"

    def input_size(self) -> tuple[int, int] | None:
        """Return width and height of the input in pixels; None if the config does not specify them."""
        if self.square:
            return self.square, self.square
        match self._exporter_metadata().get("imgsz"):
            case [int(height), int(width)] if height > 0 and width > 0:
                return width, height
            case int(side) | [int(side)] if side > 0:
                return side, side
        return None

    def rectangles(self, size: tuple[int, int]) -> tuple[tuple[int, int], ...]:
        """Return the `rectangles` in an input of this size; none unless it is Ultralytics', whose predictor has them."""
        match size, self._exporter_metadata():
            case (side, other), {"author": "Ultralytics", "stride": int(stride)} if side == other and stride in range(1, side):
                return rectangles(side, stride) if side % stride == 0 else ()
        return ()

    def keypoint_shape(self) -> tuple[int, int] | None:
        """Return the number of keypoints and of the values of each, 2 or 3; None if `metadata` does not tell them."""
        match self._exporter_metadata().get("kpt_shape"):
            case [int(count), int(values)] if count > 0 and values in {2, 3}:
                return count, values
        return None

    def keypoint_names(self, count: int) -> tuple[str, ...]:
        """Return the names of this many keypoints; empty if there are none, or classes have different ones."""
        own, by_class = _split(self.keypoints, "keypoints"), self._exporter_metadata().get("kpt_names")
        match [own] if own else list(by_class.values()) if isinstance(by_class, dict) else []:
            case [[*names], *others] if len(names) == count and all(other == names for other in others):
                return tuple(str(name).strip() for name in names) if "".join(map(str, names)).isprintable() else ()
        return ()

    def _exporter_metadata(self) -> dict[str, Any]:
        value = read_literal(self.metadata)
        return value if isinstance(value, dict) else {}


# The configs of all models are read again every few seconds, and one that reads text has 18,000 names.
@lru_cache(64)
def _split(names: str, parameter: str) -> tuple[str, ...]:
    if not names.startswith("["):
        return tuple(names.split(",") if "," in names else names.splitlines())
    try:
        return msgspec.json.decode(names, type=tuple[str, ...])
    except msgspec.DecodeError as error:
        raise ValueError(f"{parameter} begin with [, but are not a JSON array of texts: {error}") from error


def read_parameters(model: ModelConfig) -> ModelParameters:
    """Read the parameters of a model; raise `msgspec.ValidationError` if one is not valid."""
    texts: dict[str, Any] = {key: value.string_value for key, value in model.parameters.items()}
    for name in texts.keys() & {"mean", "std", "widths", "landmarks"}:
        texts[name] = [part.strip() for part in texts[name].split(",")]
    if "shapes" in texts:
        texts["shapes"] = [part.split("x") for part in texts["shapes"].split(",")]
    return msgspec.convert(texts, ModelParameters, strict=False)
