"""The files for Docker Compose, as Compose merges them."""

from typing import Any

from tests.deploy.needs import DEPLOY, defaults, load

_REPLACED = {"command", "entrypoint", "test"}
"""Lists that a later file replaces; to others, it adds."""


def read(*names: str) -> dict[str, Any]:
    """Load files as `docker compose -f FIRST -f SECOND` does, as far as the shipped ones need it."""
    project: dict[str, Any] = {}
    for name in names:
        project = change(project, load(DEPLOY / name))
    return project


def change(project: dict[str, Any], file: dict[str, Any]) -> dict[str, Any]:
    """Return a project as a further file changes it."""
    services = dict(file["services"])
    for name, service in services.items():
        if base := service.get("extends"):
            extended = load(DEPLOY / base["file"])["services"][base["service"]]
            services[name] = _merge(extended, {key: value for key, value in service.items() if key != "extends"})
    merged: dict[str, Any] = _merge(project, {**file, "services": services})
    return merged


def mounts(service: dict[str, Any]) -> dict[str, str]:
    """Return what a service mounts, by where."""
    split = [defaults(mount).split(":") for mount in service.get("volumes", [])]
    return {target: source for source, target, *_ in split}


def _merge(old: Any, new: Any, key: str = "") -> Any:  # noqa: ANN401
    if isinstance(old, dict) and isinstance(new, dict):
        return old | {name: _merge(old.get(name), value, name) for name, value in new.items()}
    if isinstance(old, list) and isinstance(new, list) and key not in _REPLACED:
        unique = {defaults(item).split(":")[1]: item for item in [*old, *new]} if key == "volumes" else {}
        return list(unique.values()) or [*old, *new]
    return new
