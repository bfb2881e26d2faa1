"""The JSON of the responses."""

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from app.model.heads import Task

BoxFormat = Literal["normalized", "pixel", "coco", "cxcywh"]
"""How boxes are written."""


class Detection(msgspec.Struct, frozen=True, kw_only=True):
    """One object: corners in the unit the caller asked for, or a `bbox` in pixels, never both.

    Both are relative to the top left of the upright image. `bbox` is x, y, width, height: of `coco`, x and y are the top left
    corner, as in COCO files; of `cxcywh`, the centre.
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
    visualization: bytes | UnsetType = UNSET
    """The picture with the detections drawn on it, in base64; for `format=image_and_json` only."""


class CocoResult(msgspec.Struct, frozen=True):
    """One object as in the results of COCO; `bbox` is x, y, width, height in pixels of the upright image."""

    image_id: int
    category_id: int
    """The class id of the model, from 0."""
    bbox: tuple[float, float, float, float]
    score: float


class Classification(msgspec.Struct, frozen=True, kw_only=True):
    """One class that the image may show."""

    class_: int = msgspec.field(name="class")
    class_id: int
    class_name: str
    confidence: float


class ClassifyResponse(msgspec.Struct, frozen=True):
    """Classes by descending confidence."""

    classifications: list[Classification]
    num_classifications: int
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
    """The version that answers, unless a request asks for another one: the newest."""
    versions: list[str] = []
    """All that are ready, ascending."""
    width: int | None = None
    height: int | None = None
    task: Task | None = None
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
    latency_ms: float | None = None
    """How long it took to answer the question for its version."""
    models_ready: list[str] = []


class ServerHealth(msgspec.Struct, frozen=True):
    """One of the Tritons."""

    address: str
    """`host:port` of its gRPC endpoint."""
    status: Literal["ready", "not_ready", "unreachable"]
    """Whether the default model is ready there."""
    version: str | None
    latency_ms: float | None
    models_ready: list[str]
    transport: Literal["shm", "inline"]
    left_out: list[str]
    """Models that the worker that answered does not ask it for now, because it fails."""
    share: float
    """Its part of the images that this worker has sent in the last seconds; 0 if there were none."""


class GpuDevice(msgspec.Struct, frozen=True):
    """A GPU that Triton sees; what it does not tell is null."""

    id: str
    utilization: float | None
    memory_used_mb: float | None
    memory_total_mb: float | None


class GpuHealth(msgspec.Struct, frozen=True):
    """Whether the default model runs on a GPU, and all that Triton sees."""

    in_use: bool
    devices: list[GpuDevice]


class Memory(msgspec.Struct, frozen=True):
    """Resident memory of the worker that answered, and of all workers of the host."""

    rss_mb: float
    workers_mb: list[float]


class LimitsInForce(msgspec.Struct, frozen=True):
    """What the gateway allows. Sizes are MiB, except those of images; times are seconds."""

    max_file_size_mb: float
    max_batch_size_mb: float
    max_megapixels: float
    max_megapixels_unscalable: float
    max_uploads: int
    memory_mb: float
    timeout_seconds: float
    max_timeout_seconds: float
    requests: dict[str, int] = {}
    """By model, as many as can be answered in time."""


class Performance(msgspec.Struct, frozen=True):
    """Memory of all workers of the host, and which optimizations are in use."""

    memory_mb: float
    optimizations: dict[str, bool | str]


class Health(msgspec.Struct, frozen=True):
    """State of the gateway, Triton and the default model; the status is 503 when no detection is possible."""

    status: Literal["healthy", "unhealthy"]
    version: str
    api: Literal["healthy"]
    triton: TritonHealth
    """The only Triton; or the best of several, with the models of all."""
    tritons: list[ServerHealth]
    model: str
    model_ready: bool
    gpu: GpuHealth
    memory: Memory
    performance: Performance
    limits: LimitsInForce


class Liveness(msgspec.Struct, frozen=True):
    """The worker process answers."""

    status: Literal["alive"]


class Readiness(msgspec.Struct, frozen=True):
    """Whether the default model is ready."""

    status: Literal["ready", "not_ready"]
