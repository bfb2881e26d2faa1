"""The JSON of the responses."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

BoxFormat = Literal["normalized", "pixel", "coco"]
"""How boxes are written."""


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """One object: corners in the unit the caller asked for, or a `bbox` as in COCO files, never both.

    Corners are relative to the top left of the upright image; `bbox` is x, y, width, height in pixels.
    """

    x1: float | UnsetType = UNSET
    y1: float | UnsetType = UNSET
    x2: float | UnsetType = UNSET
    y2: float | UnsetType = UNSET
    bbox: tuple[float, float, float, float] | UnsetType = UNSET
    confidence: float
    class_: int = msgspec.field(name="class")
    class_id: int
    class_name: str


class ImageSize(msgspec.Struct, frozen=True):
    """The upright image (EXIF orientation applied), in pixels."""

    width: int
    height: int


class ModelUsed(msgspec.Struct, frozen=True):
    """The model that answered, and its device."""

    name: str
    version: str
    backend: str
    device: Literal["cpu", "gpu"]


class DetectResponse(msgspec.Struct, frozen=True):
    """Detections by descending confidence."""

    detections: list[Detection]
    num_detections: int
    status: Literal["success"]
    image: ImageSize
    model: ModelUsed
    total_time_ms: float
    request_id: str


class Problem(msgspec.Struct, frozen=True):
    """An error as in RFC 9457 (`application/problem+json`)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str


class ModelInfo(msgspec.Struct, frozen=True):
    """A model that Triton knows or that `pull` can get."""

    name: str
    state: Literal["ready", "not_ready", "not_pulled"]
    version: str | None = None
    width: int | None = None
    height: int | None = None
    output_format: str | None = None
    device: Literal["cpu", "gpu"] | None = None
    classes: list[str] = []
    source: str | None = None
    licence: str | None = None
    detail: str | None = None


class ModelList(msgspec.Struct, frozen=True):
    """All models, by name."""

    default: str
    models: list[ModelInfo]


class TritonHealth(msgspec.Struct, frozen=True):
    """What Triton says of itself."""

    status: Literal["ready", "not_ready", "unreachable"]
    version: str | None = None


class Memory(msgspec.Struct, frozen=True):
    """Memory of the worker process that answered."""

    rss_mb: float


class Performance(msgspec.Struct, frozen=True):
    """Memory of the worker, and which optimizations are in use."""

    memory_mb: float
    optimizations: dict[str, bool | str]


class Health(msgspec.Struct, frozen=True):
    """State of the gateway, Triton and the default model; the status is 503 when no detection is possible."""

    status: Literal["healthy", "unhealthy"]
    version: str
    api: Literal["healthy"]
    triton: TritonHealth
    model: str
    model_ready: bool
    gpu: bool
    memory: Memory
    performance: Performance


class Liveness(msgspec.Struct, frozen=True):
    """The worker process answers."""

    status: Literal["alive"]


class Readiness(msgspec.Struct, frozen=True):
    """Whether the default model is ready."""

    status: Literal["ready", "not_ready"]
