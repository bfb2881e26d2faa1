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
    status: str | None = None
    """Its state as Triton names it, such as `READY`; null if Triton does not have it, or does not tell."""
    versions: list[str] = []
    """Those that are loaded."""
    backend: str | None = None
    """What runs it in Triton."""
    max_batch_size: int | None = None
    has_labels: bool = False
    num_classes: int | None = None
    input_shape: list[int] | None = None
    """Of one image, without the batch dimension."""


class ModelList(msgspec.Struct, frozen=True):
    """All models, by name."""

    default: str
    models: list[ModelInfo]
    total: int
    triton_status: Literal["READY"] = "READY"
    """Without Triton there is no list; the answer is 503."""


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


class TritonService(msgspec.Struct, frozen=True):
    """Whether any Triton answers."""

    ok: bool
    detail: str
    url: str
    """`host:port` of its gRPC endpoint; of several, separated by commas."""


class Services(msgspec.Struct, frozen=True):
    """What the gateway needs to work."""

    triton: TritonService


class Resources(msgspec.Struct, frozen=True):
    """What the worker that answered uses."""

    memory_mb: float
    cpu_percent: float
    """Of one core, on average since the worker was started."""


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
    api_version: str
    services: Services
    resources: Resources


class Liveness(msgspec.Struct, frozen=True):
    """The worker process answers."""

    status: Literal["alive"]


class Readiness(msgspec.Struct, frozen=True):
    """Whether the default model is ready."""

    status: Literal["ready", "not_ready"]


class ReadinessReport(msgspec.Struct, frozen=True):
    """Whether the default model is ready, and on what that depends."""

    status: Literal["ready", "not_ready"]
    version: str
    api_version: str
    services: Services
    resources: Resources


class Backend(msgspec.Struct, frozen=True):
    """What runs the models, and whether the default one runs on a GPU, as far as is known."""

    name: Literal["triton"]
    gpu_available: bool


class ServiceDescription(msgspec.Struct, frozen=True):
    """What this service is, and where to find what it does."""

    service: str
    status: Literal["running"]
    version: str
    api_version: str
    endpoints: dict[str, str]
    """Paths by what they are for."""
    models: dict[str, str]
    """The default model of each task."""
    backend: Backend
