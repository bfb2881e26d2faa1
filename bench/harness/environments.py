"""Environments of programs that are not this project's, each made from its own file in requirements/."""

import hashlib
import sys
from pathlib import Path

from app.host.packages import make_environment
from bench.harness.errors import ContestantError
from bench.harness.processes import ROOT


class Environment:
    """A virtual environment, `.NAME` in this checkout, with what requirements/NAME.txt lists."""

    def __init__(self, name: str, experiment: str) -> None:
        """Name it, without making it.

        Args:
            name: Of the folder and of the requirements.
            experiment: What makes it with `--install`, for the message where it is missing.
        """
        self.folder = ROOT / f".{name}"
        self.missing = f"the environment of {name} is not there yet; run: ./just bench {experiment} --install"
        self._requirements = ROOT / "requirements" / f"{name}.txt"

    def python(self) -> Path:
        """Return its Python.

        Raises:
            ContestantError: It was not made, or from other requirements.
        """
        if not self.is_installed():
            raise ContestantError(self.missing)
        return self.folder / "bin" / "python"

    def is_installed(self) -> bool:
        """Return whether it was made in full from today's requirements."""
        mark = self._mark()
        return mark.is_file() and mark.read_text(encoding="utf-8") == self._tag()

    def install(self) -> None:
        """Make it, unless it is there.

        Raises:
            PackageError: A package is not available; pip has printed why.
        """
        if not self.is_installed():
            make_environment(self.folder, self._requirements, sys.executable)
            self._mark().write_text(self._tag(), encoding="utf-8")

    def _mark(self) -> Path:
        return self.folder / "complete"

    def _tag(self) -> str:
        return f"{hashlib.sha256(self._requirements.read_bytes()).hexdigest()} {sys.version_info.major}.{sys.version_info.minor}"


REFERENCE = Environment("reference", "versus")
"""The environment of the servers in `bench.contestants`."""
LOCUST = Environment("locust", "locust")
"""The environment of `bench/locustfile.py`."""
