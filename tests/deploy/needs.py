"""What the application needs of whatever runs it: time to stop, memory, settings that it knows."""

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from app.host import cores
from app.settings import rules
from app.settings.schema import PREFIX, Settings
from app.triton.shared_memory import MAX_WORKER_BYTES
from tests.support import ROOT

DEPLOY = ROOT / "deploy"
IMAGE = f"nereid:{tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']['version']}"

WORKER_BYTES = 200 << 20
"""Resident memory of a worker without its shared memory; 180 MiB is the most that was measured."""
SUPERVISOR_SECONDS = 5
"""How much longer than an instance `serve` waits for it."""
EMBEDDED_TRITON_SECONDS = 10
"""How long the embedded Triton may take to end."""
TRITON_SECONDS = 30
"""How long a Triton gives the requests in progress by default."""

_UNITS = {"": 1, "m": 1 << 20, "Mi": 1 << 20, "g": 1 << 30, "Gi": 1 << 30}


def load(path: Path) -> Any:  # noqa: ANN401
    return msgspec.yaml.decode(path.read_bytes())


def defaults(text: str) -> str:
    """Replace Compose variables by their defaults."""
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)


def nbytes(quantity: str) -> int:
    """Return the bytes of a quantity as Compose and Kubernetes write it, such as 2g and 2Gi."""
    number, unit = re.fullmatch(r"(\d+)([a-zA-Z]*)", quantity).groups()  # type: ignore[union-attr]
    return int(number) * _UNITS[unit]


def settings_of(environment: Mapping[str, str]) -> Settings:
    """Make the settings of an environment; each must be one that the application knows, and all must fit each other."""
    values = {name.removeprefix(PREFIX).lower(): value for name, value in environment.items() if name.startswith(PREFIX)}
    settings = msgspec.convert(values, Settings, strict=False)
    rules.check(settings)
    return settings


def sockets(settings: Settings) -> list[str]:
    """Return the addresses of the instances of `serve`, as NGINX writes them."""
    return [f"unix:{settings.socket_folder}/nereid-{number}.sock" for number in range(1, settings.instances + 1)]


def upstream(file: str) -> list[str]:
    return re.findall(r"^\s*server (\S+?)[ ;](?!.*backup)", (DEPLOY / "nginx" / file).read_text(encoding="utf-8"), re.MULTILINE)


def stop_seconds(settings: Settings) -> float:
    """Return the maximum time from SIGTERM to the end of an instance."""
    return settings.drain_delay_seconds + settings.drain_seconds


def shared_memory_bytes(settings: Settings) -> int:
    """Return the maximum shared memory of all workers."""
    return _workers(settings) * MAX_WORKER_BYTES


def memory_bytes(settings: Settings, limit: int) -> int:
    """Return how much memory the workers may take under a limit, without their shared memory: themselves, images, bodies."""
    budget = settings.memory_mb << 20 or limit // 8
    return _workers(settings) * WORKER_BYTES + 2 * budget


def _workers(settings: Settings) -> int:
    return max(1, settings.instances) * cores.workers(settings.workers, settings.instances)
