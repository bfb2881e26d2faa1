"""How the shipped files are read, and what the application itself says of the settings and paths in them."""

import re
import shlex
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from app import feature
from app.api.application import table_of
from app.api.dialects import deepstack_names
from app.api.dialects.dialect import load as load_dialects
from app.api.routes import Target
from app.api.search import routes as search
from app.settings.schema import DIALECTS, PREFIX, Settings
from tests.support import ROOT

DEPLOY = ROOT / "deploy"
DASHBOARD = DEPLOY / "grafana" / "nereid.json"
IMAGE = f"nereid:{tomllib.loads((ROOT / 'pyproject.toml').read_text(encoding='utf-8'))['project']['version']}"

_OF_SEARCH = dict(table_of([deepstack_names.DIALECT], search.MODEL_ROUTES).paths)
# A worker only passes paths of search on. What is taken there is what counts.
PATHS: list[tuple[str, Target]] = [
    *((path, target) for path, target in table_of(load_dialects(DIALECTS)).paths if path not in _OF_SEARCH),
    *_OF_SEARCH.items(),
]
"""The paths at which models are asked, by workers and by the process of search, in Litestar's syntax, and their targets."""


def load(path: Path) -> Any:  # noqa: ANN401
    return msgspec.yaml.decode(path.read_bytes())


def defaults(text: str) -> str:
    """Replace Compose variables by their defaults."""
    return re.sub(r"\$\{\w+:-(.*?)\}", r"\1", text)


def nbytes(quantity: str) -> int:
    """Return the bytes of a quantity as Compose and Kubernetes write it, such as 2g and 2Gi."""
    number, unit = quantity.rstrip("gmiGM"), quantity.lstrip("0123456789").lower()
    return int(number) << {"": 0, "m": 20, "g": 30}[unit.removesuffix("i")]


def settings_of(environment: Mapping[str, str]) -> Settings:
    """Make the settings of an environment; each must be one that the application knows, and all must fit each other."""
    values = {name.removeprefix(PREFIX).lower(): defaults(value) for name, value in environment.items() if name.startswith(PREFIX)}
    settings = msgspec.convert(values, feature.settings_kind(), strict=False)
    feature.check(settings)
    return settings


def upstream(file: str) -> list[str]:
    """Return the instances in a file for NGINX."""
    return re.findall(r"^\s*server (\S+?)[ ;](?!.*backup)", (DEPLOY / "nginx" / file).read_text(encoding="utf-8"), re.MULTILINE)


Service = dict[str, Any]

_REPLACED = {"command", "entrypoint", "test"}
"""Lists that a later file replaces; to others, it adds."""


def mounts(service: Service) -> dict[str, str]:
    """Return what a service mounts, by where."""
    split = [defaults(mount).split(":") for mount in service.get("volumes", [])]
    return {target: source for source, target, *_ in split}


def _changed(project: dict[str, Any], file: dict[str, Any]) -> dict[str, Any]:
    """Return a project as `docker compose -f PROJECT -f FILE` has it, as far as the shipped files need it."""
    services = dict(file["services"])
    for name, service in services.items():
        if base := service.get("extends"):
            extended = load(ROOT / base["file"])["services"][base["service"]]
            services[name] = _merge(extended, {key: value for key, value in service.items() if key != "extends"})
    merged: dict[str, Any] = _merge(project, {**file, "services": services})
    return merged


def _merge(old: Any, new: Any, key: str = "") -> Any:  # noqa: ANN401
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: _merge(old.get(name), value, name) for name, value in new.items()}
    if isinstance(old, list) and isinstance(new, list) and key not in _REPLACED:
        unique = {defaults(item).split(":")[1]: item for item in [*old, *new]} if key == "volumes" else {}
        return list(unique.values()) or [*old, *new]
    return new


_EXAMPLES = re.findall(r"```yaml\n(.*?)```", (ROOT / "docs/how-to/several-gpus.md").read_text(encoding="utf-8"), re.DOTALL)
PROJECTS: dict[str, dict[str, Any]] = {"compose.yaml": load(ROOT / "compose.yaml")}
PROJECTS["compose.nvidia.yaml"] = _changed(PROJECTS["compose.yaml"], load(ROOT / "compose.nvidia.yaml"))
for _file in sorted(DEPLOY.glob("compose.*.yaml")):
    PROJECTS[_file.name] = _changed(PROJECTS["compose.nvidia.yaml"], load(_file))
for _text in _EXAMPLES:
    PROJECTS[f"example-{len(PROJECTS)}"] = _changed(PROJECTS["compose.gpus.yaml"], msgspec.yaml.decode(_text))
SERVICES: dict[str, dict[str, Service]] = {name: project["services"] for name, project in PROJECTS.items()}
CPU, GPU, GPUS = (SERVICES[f"compose{name}.yaml"] for name in ("", ".nvidia", ".gpus"))
INSTANCES = [name for name, service in CPU.items() if service.get("command") == ["api"]]

UNITS = ["nereid.service", "tritonserver@.service", "nereid-compose.service"]
MODELS = "tritonserver-models.conf"
"""A drop-in for `tritonserver@.service`."""


def read_unit(unit: str) -> dict[str, list[str]]:
    text = (DEPLOY / "systemd" / unit).read_text(encoding="utf-8").replace("\\\n", " ")
    options: dict[str, list[str]] = {}
    for name, value in re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE):
        options.setdefault(name, []).append(value)
    return options


NEREID, TRITON, COMPOSE = map(read_unit, UNITS)


def environment(text: str) -> dict[str, str]:
    return dict(pair.split("=", 1) for pair in shlex.split(text, comments=True))


def triton_command(gpu: int, **changes: str) -> list[str]:
    """Return the command line of `tritonserver@GPU`, with changes to its environment as a drop-in makes them."""
    variables = {**environment(" ".join(TRITON["Environment"])), **changes}
    command = shlex.split(TRITON["ExecStart"][0].replace("%i", str(gpu)))
    return [re.sub(r"\$\{(\w+)\}", lambda found: variables[found[1]], word) for word in command]


def options_of(command: list[str]) -> dict[str, str]:
    return dict(word.removeprefix("--").split("=", 1) for word in command if "=" in word)
