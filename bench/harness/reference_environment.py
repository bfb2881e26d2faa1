"""The environment of the servers in `bench.contestants`, made from requirements/reference.txt."""

import hashlib
import sys
from pathlib import Path

from app.host.packages import make_environment
from bench.harness.errors import ContestantError
from bench.harness.processes import ROOT

REFERENCE = ROOT / ".reference"
_REQUIREMENTS = ROOT / "requirements" / "reference.txt"


def reference_python() -> Path:
    """Return the Python of the environment.

    Raises:
        ContestantError: It was not made, or from other requirements.
    """
    if not is_installed():
        raise ContestantError("the reference has no environment yet; run: ./just bench versus --install")
    return REFERENCE / "bin" / "python"


def is_installed() -> bool:
    """Return whether the environment was made in full from today's requirements."""
    mark = _mark()
    return mark.is_file() and mark.read_text(encoding="utf-8") == _tag()


def install_reference() -> None:
    """Make the environment, unless it is there.

    Raises:
        PackageError: A package is not available; pip has printed why.
    """
    if not is_installed():
        make_environment(REFERENCE, _REQUIREMENTS, sys.executable)
        _mark().write_text(_tag(), encoding="utf-8")


def _mark() -> Path:
    return REFERENCE / "complete"


def _tag() -> str:
    return f"{hashlib.sha256(_REQUIREMENTS.read_bytes()).hexdigest()} {sys.version_info.major}.{sys.version_info.minor}"
