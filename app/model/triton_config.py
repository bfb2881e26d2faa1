"""The parts of a model's Triton config that the gateway reads.

Its `parameters` tell what the tensors cannot, with these defaults:

    labels      class names, comma separated, or a JSON array, for names with commas (else the `names` of Ultralytics'
                `metadata`, else the class ids)
    placement   center | top_left   where the image lies in the model's input (top_left for a YOLOX head)
    enlarge     true | false        whether small images are enlarged to the input size (true)
    pad         0 to 255            the value around the image (114)
    channels    RGB | BGR           channel order (BGR for a YOLOX head)
    scale       float               divisor of each byte, for a float input (255; 1 for a YOLOX head)
    square      pixels              side of the input, where its shape does not tell (`imgsz`, else 640)
    box_units   pixels | normalized unit of the output boxes, relative to the input (pixels)
    iou         0 to 1              overlap above which two boxes of a class are one object (0.7); for rows of six, only if the
                                    model suppresses boxes itself
    metadata                        what Ultralytics' exporter writes: a Python dict as text
    device      cpu | gpu           where it runs, if it is an ensemble, whose config cannot tell (cpu)
    source, licence                 shown by /models
"""

import ast
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

Placement = Literal["center", "top_left"]
"""Where an image lies in the model's input."""


class TensorConfig(msgspec.Struct):
    """An input or output; `dims` without the batch dimension that `max_batch_size` implies."""

    name: str
    data_type: str
    dims: list[int]


class InstanceGroup(msgspec.Struct):
    """Where instances run."""

    kind: str = "KIND_AUTO"
    count: int = 1
    gpus: list[int] = []


class ParameterValue(msgspec.Struct):
    """The value of a parameter."""

    string_value: str = ""


class Ensemble(msgspec.Struct, frozen=True):
    """Models that an ensemble joins."""

    step: list[dict[str, Any]] = []


class ModelConfig(msgspec.Struct):
    """Triton's ModelConfig, as in its JSON."""

    name: str
    backend: str = ""
    platform: str = ""
    max_batch_size: int = 0
    input: list[TensorConfig] = []
    output: list[TensorConfig] = []
    instance_group: list[InstanceGroup] = []
    ensemble_scheduling: Ensemble = Ensemble()
    parameters: dict[str, ParameterValue] = {}


class ModelParameters(msgspec.Struct):
    """The parameters listed above, validated."""

    labels: str = ""
    placement: Placement | None = None
    enlarge: bool = True
    pad: Annotated[int, Meta(ge=0, le=255)] = 114
    channels: Literal["RGB", "BGR"] | None = None
    scale: Annotated[float, Meta(gt=0, le=65535)] | None = None
    square: Annotated[int, Meta(ge=32, le=8192)] | None = None
    box_units: Literal["pixels", "normalized"] = "pixels"
    iou: Annotated[float, Meta(ge=0, le=1)] | None = None
    device: Literal["cpu", "gpu"] = "cpu"
    source: str = ""
    licence: str = ""
    metadata: str = ""

    def __post_init__(self) -> None:
        """Reject labels that begin like a JSON array and are none."""
        self._labels()

    def class_names(self) -> tuple[str, ...]:
        """Return the class names by id; empty if the config has none."""
        if labels := self._labels():
            return tuple(label.strip() for label in labels)
        names = self._exporter_metadata().get("names")
        if not isinstance(names, dict) or names.keys() != set(range(len(names))):
            return ()
        return tuple(str(names[index]) for index in range(len(names)))

    def side(self) -> int | None:
        """Return the side of the input in pixels; None if the config does not tell."""
        size = self._exporter_metadata().get("imgsz")
        if isinstance(size, list | tuple) and size:
            size = size[0]
        return self.square or (size if isinstance(size, int) and size > 0 else None)

    def _labels(self) -> list[str]:
        if not self.labels.startswith("["):
            return self.labels.split(",") if self.labels else []
        try:
            return msgspec.json.decode(self.labels, type=list[str])
        except msgspec.DecodeError as error:
            raise ValueError(f"labels begin with [, but are not a JSON array of texts: {error}") from error

    def _exporter_metadata(self) -> dict[str, Any]:
        try:
            value = ast.literal_eval(self.metadata) if self.metadata else {}
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # all that literal_eval is known to raise
            return {}
        return value if isinstance(value, dict) else {}
