"""The part of a model's Triton config that is read here.

Its `parameters` tell what tensors cannot, with the default where one is missing:

    labels      class names, comma separated (else the `names` of Ultralytics' `metadata`, else the ids)
    placement   center | top_left   where the picture lies in the frame (top_left for a YOLOX head)
    enlarge     true | false        whether small pictures grow to the frame (true)
    pad         0 to 255            the value around the picture (114)
    channels    RGB | BGR           (BGR for a YOLOX head)
    scale       float               what a byte is divided by for a float input (255; 1 for a YOLOX head)
    square      pixels              side of the frame, where the input's shape does not say (`imgsz`, else 640)
    box_units   pixels | normalized of the frame, for boxes that come out (pixels)
    iou         0 to 1              overlap above which two boxes of a class are one, for raw heads (0.7)
    metadata                        what Ultralytics' exporter writes: a Python dict as text
    source, licence                 told by /models
"""

import ast
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta


class TensorConfig(msgspec.Struct):
    """An input or output; `dims` without the batch dimension that `max_batch_size` implies."""

    name: str
    data_type: str
    dims: list[int]


class InstanceGroup(msgspec.Struct):
    """Where instances run."""

    kind: str = "KIND_AUTO"


class Text(msgspec.Struct):
    """The value of a parameter."""

    string_value: str = ""


class ModelConfig(msgspec.Struct):
    """Triton's ModelConfig, as its JSON has it."""

    name: str
    backend: str = ""
    platform: str = ""
    max_batch_size: int = 0
    input: list[TensorConfig] = []
    output: list[TensorConfig] = []
    instance_group: list[InstanceGroup] = []
    parameters: dict[str, Text] = {}


class Hints(msgspec.Struct):
    """The parameters above, checked."""

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

    def class_names(self) -> tuple[str, ...]:
        """Names by id; empty where nothing tells them."""
        if self.labels:
            return tuple(label.strip() for label in self.labels.split(","))
        names = self._exported().get("names")
        if not isinstance(names, dict) or names.keys() != set(range(len(names))):
            return ()
        return tuple(str(names[index]) for index in range(len(names)))

    def side(self) -> int | None:
        """Side of the frame, pixels; None where nothing tells it."""
        size = self._exported().get("imgsz")
        if isinstance(size, list | tuple) and size:
            size = size[0]
        return self.square or (size if isinstance(size, int) and size > 0 else None)

    def _exported(self) -> dict[str, Any]:
        try:
            value = ast.literal_eval(self.metadata) if self.metadata else {}
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):  # all that literal_eval is known to raise
            return {}
        return value if isinstance(value, dict) else {}
