"""The JSON of the service's description."""

from typing import Literal

import msgspec


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
