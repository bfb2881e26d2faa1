"""The files for Docker Compose, as Compose merges them."""

import re
from typing import Any

import msgspec

from tests.deploy.needs import DEPLOY, defaults, load
from tests.support import ROOT

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
            extended = load(DEPLOY / base["file"])["services"][base["service"]]
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
PROJECTS: dict[str, dict[str, Any]] = {name: load(DEPLOY / name) for name in ("compose.yaml", "compose.cpu.yaml")}
for _name in ("gpus", "outside", "models", "search"):
    PROJECTS[f"compose.{_name}.yaml"] = _changed(PROJECTS["compose.yaml"], load(DEPLOY / f"compose.{_name}.yaml"))
for _text in _EXAMPLES:
    PROJECTS[f"example-{len(PROJECTS)}"] = _changed(PROJECTS["compose.gpus.yaml"], msgspec.yaml.decode(_text))
SERVICES: dict[str, dict[str, Service]] = {name: project["services"] for name, project in PROJECTS.items()}
GPU, CPU, GPUS = (SERVICES[f"compose{name}.yaml"] for name in ("", ".cpu", ".gpus"))
INSTANCES = [name for name, service in GPU.items() if service.get("command") == ["api"]]
