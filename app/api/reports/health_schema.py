"""The JSON of reports on health and readiness."""

from typing import Literal

import msgspec


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
    max_megapixels_non_jpeg: float
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
