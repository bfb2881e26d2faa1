"""Extras: packages that one feature needs, and the rest of the gateway does not."""

from collections.abc import Mapping, Sequence
from functools import cache
from importlib.util import find_spec

import structlog

from app.errors import NotOffered
from app.host.program import IS_ONE_FILE

MODULES = {
    "heic": ("pi_heif",),
    "masks": ("pycocotools",),
    "ocr": ("pyclipper",),
    "otel": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
    "search": ("asyncpg", "blake3", "pgvector"),
}
"""By extra of pyproject.toml: what it is imported for; features have others."""

LOG = structlog.get_logger()


def missing(extra: str, modules: Mapping[str, Sequence[str]] = MODULES) -> str:
    """Return which modules of an extra are not installed, without importing them; empty if all are."""
    return "" if IS_ONE_FILE else ", ".join(module for module in modules[extra] if not _is_installed(module))


def lack(extra: str, subject: str, modules: Mapping[str, Sequence[str]] = MODULES) -> str:
    """Return what a subject needs an extra for, and is not installed, in a sentence; empty if it is installed."""
    return f"{subject} needs what is not installed: {names}" if (names := missing(extra, modules)) else ""


def command(extra: str) -> str:
    """Return the command that installs an extra."""
    return f"pip install 'nereid-gateway[{extra}]'"


def require(extra: str, purpose: str) -> None:
    """Raise NotOffered if an extra is not installed, and log that once."""
    if lacking := lack(extra, purpose):
        warn_once(lacking, command(extra))
        raise NotOffered(f"{lacking}; {command(extra)}")


@cache
def warn_once(reason: str, fix: str) -> None:
    """Log that requests need an extra; each reason once in a worker."""
    LOG.warning("a request needs an extra", reason=reason, fix=fix)


def _is_installed(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # not even the package that it is in
        return False
