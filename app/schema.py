"""The JSON we send."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

Unit = Literal["normalized", "pixel", "coco"]
"""What the numbers of a box count."""


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """One object, in the unit the caller asked for: corners, or the `bbox` of COCO files, never both.

    Corners count from the top left of the upright picture; `bbox` is x, y, width, height in pixels.
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
    """The upright picture (EXIF orientation applied), in pixels."""

    width: int
    height: int


class ModelUsed(msgspec.Struct, frozen=True):
    """Which model answered, and on what."""

    name: str
    version: str
    backend: str
    device: Literal["cpu", "gpu"]


class DetectResponse(msgspec.Struct, frozen=True):
    """Detections by falling confidence."""

    detections: list[Detection]
    num_detections: int
    status: Literal["success"]
    image: ImageSize
    model: ModelUsed
    total_time_ms: float
    request_id: str


class Problem(msgspec.Struct, frozen=True):
    """An error, as RFC 9457 has it (`application/problem+json`)."""

    type: str
    title: str
    status: int
    detail: str
    code: str
    request_id: str


class ModelInfo(msgspec.Struct, frozen=True):
    """A model that Triton knows or that `pull` could get."""

    name: str
    state: Literal["ready", "not_ready", "not_pulled"]
    version: str | None = None
    width: int | None = None
    height: int | None = None
    layout: str | None = None
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
    """Of the worker process that answered."""

    rss_mb: float


class Performance(msgspec.Struct, frozen=True):
    """What the worker uses and which of the fast parts are in force."""

    memory_mb: float
    optimizations: dict[str, bool | str]


class Health(msgspec.Struct, frozen=True):
    """For people and dashboards; status 503 when no picture could be served."""

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
    """The process answers."""

    status: Literal["alive"]


class Readiness(msgspec.Struct, frozen=True):
    """Whether the default model can be asked."""

    status: Literal["ready", "not_ready"]
