"""The JSON of the health and readiness reports."""

from typing import Literal

import msgspec

from app.api.dependencies import LimitsInForce


class ServerHealth(msgspec.Struct, frozen=True):
    """One of the Tritons."""

    address: str
    """`host:port` of its gRPC endpoint."""
    status: Literal["ready", "not_ready", "unreachable"]
    """State of the default model on this Triton."""
    version: str | None
    transport: Literal["shm", "inline"]
    left_out: list[str]
    """Models for which the answering worker currently avoids this Triton, because their inferences fail."""
    share: float
    """Share, 0 to 1, of the images that the answering worker sent to it in the last seconds; 0 if none were sent."""


class GpuDevice(msgspec.Struct, frozen=True):
    """A GPU that Triton sees; unreported values are null."""

    id: str
    utilization: float | None
    memory_used_mb: float | None
    memory_total_mb: float | None


class GpuHealth(msgspec.Struct, frozen=True):
    """Whether the default model runs on a GPU, and all GPUs that Triton sees."""

    in_use: bool
    devices: list[GpuDevice]


class Memory(msgspec.Struct, frozen=True):
    """Resident memory of each worker of the host."""

    workers_mb: list[float]


class Workers(msgspec.Struct, frozen=True):
    """Workers of the host. Fewer run than are wanted while one cannot start; more do while one is renewed."""

    running: int
    wanted: int


class Performance(msgspec.Struct, frozen=True):
    """Memory of all workers of the host, and the active optimizations."""

    memory_mb: float
    optimizations: dict[str, bool | str]


class TritonService(msgspec.Struct, frozen=True):
    """Whether any Triton responds."""

    ok: bool
    detail: str
    url: str
    """`host:port` of the gRPC endpoints, separated by commas."""


class Services(msgspec.Struct, frozen=True):
    """The services that the gateway depends on."""

    triton: TritonService


class Resources(msgspec.Struct, frozen=True):
    """Resource usage of the answering worker."""

    memory_mb: float
    cpu_percent: float
    """Percent of one core, averaged since the worker started."""


class Health(msgspec.Struct, frozen=True):
    """State of the gateway, Triton and the default model. The HTTP status is 503 when no detection is possible."""

    status: Literal["healthy", "unhealthy"]
    version: str
    api: Literal["healthy"]
    triton: Literal["healthy", "unhealthy"]
    """Whether any Triton responds."""
    detail: str | None
    """Why the default model cannot be used, if its spec cannot be read."""
    tritons: list[ServerHealth]
    model: str
    gpu: GpuHealth
    memory: Memory
    performance: Performance
    limits: LimitsInForce
    workers: Workers
    refused_files: list[str]
    """Files (`api_keys`, `triton_tls`, `label_studio_token`) that are not valid now: their last valid content is in use."""
    failing_models: dict[str, int]
    """Models that Triton fails to run, also those that it calls ready: how many workers reject requests for each."""
    model_deaths: dict[str, int]
    """Calls and probes since the start that have found that a process of the model had died. Triton calls such a model ready."""


class Liveness(msgspec.Struct, frozen=True):
    """The worker process responds."""

    status: Literal["alive"]


class Readiness(msgspec.Struct, frozen=True):
    """Whether the default model is ready."""

    status: Literal["ready", "not_ready"]


class ReadinessReport(msgspec.Struct, frozen=True):
    """Whether the default model is ready, and the services it depends on."""

    status: Literal["ready", "not_ready"]
    version: str
    api_version: str
    services: Services
    resources: Resources
