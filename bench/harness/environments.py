"""Environments of external programs, each installed from a file in requirements/."""

import hashlib
import sys
from pathlib import Path

import PIL

from app.host.packages import make_environment
from bench.harness.errors import ContestantError
from bench.harness.processes import ROOT


class Environment:
    """A virtual environment, `.NAME` in this checkout, with the packages of requirements/NAME.txt."""

    def __init__(self, name: str, command: str, *, has_our_pillow: bool = False) -> None:
        """Describe the environment without creating it; `command` creates it, for the error if it is missing."""
        self._has_our_pillow = has_our_pillow
        self.folder = ROOT / f".{name}"
        self.missing = f"the environment of {name} is not there yet; run: {command}"
        self._requirements = ROOT / "requirements" / f"{name}.txt"
        self._mark = self.folder / "complete"

    def python(self) -> Path:
        """Return its Python; raise ContestantError if it is missing, or was created from other requirements."""
        if not self.is_installed():
            raise ContestantError(self.missing)
        return self.folder / "bin" / "python"

    def is_installed(self) -> bool:
        """Return whether it was created completely from the current requirements."""
        return self._mark.is_file() and self._mark.read_text(encoding="utf-8") == self._tag()

    def install(self) -> None:
        """Create the environment if necessary; raise CommandError if a package is not available."""
        if not self.is_installed():
            make_environment(self.folder, self._requirements, sys.executable, "--no-deps")  # all are in the file
            if self._has_our_pillow:  # pillow-simd has no wheels
                (packages,) = self.folder.glob("lib/python3*/site-packages")
                (packages / "PIL").symlink_to(Path(PIL.__file__).parent)
            self._mark.write_text(self._tag(), encoding="utf-8")

    def _tag(self) -> str:
        return f"{hashlib.sha256(self._requirements.read_bytes()).hexdigest()} {sys.version_info.major}.{sys.version_info.minor}"


REFERENCE = Environment("reference", "./just bench versus --install", has_our_pillow=True)
"""The environment of the servers in `bench.contestants`."""
LOCUST = Environment("locust", "./just bench locust --install")
"""The environment of `bench/locustfile.py`."""
TENSORRT_RTX = Environment("tensorrt_rtx", "./just tensorrt-rtx")
"""The environment of `tests/system/test_tensorrt.py`."""
PEERS = Environment("peers", "./just bench peers --install")
"""The environment of `bench.contestants.plain` and `bench.contestants.lit`."""
ROBOFLOW = Environment("roboflow", "./just bench peers --install roboflow")
"""The environment of `bench.contestants.roboflow_inference`."""
