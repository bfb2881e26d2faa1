"""References to models: `name`, or `name:version` for a specific version.

Each reference has its own spec, batches and circuits; the versions of a model share its limits.
"""

import re

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""Names of the models and cascades in a repository."""


def refer_to(name: str, version: int | str | None) -> str:
    """Return the reference of a model's version; None or empty means the version that Triton chooses, the newest."""
    return f"{name}:{version}" if version else name


def split_reference(reference: str) -> tuple[str, str]:
    """Return the name and the version of a model; the version is empty if Triton chooses it."""
    name, _, version = reference.partition(":")
    return name, version
