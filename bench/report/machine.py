"""The machine and versions of a record."""

import platform
import shutil
import subprocess
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import msgspec
import psutil

PACKAGES = ("nereid", "granian", "litestar", "msgspec", "numpy", "pillow", "pillow-simd", "simplejpeg", "tritonclient", "uvloop")
"""Packages whose versions are recorded."""


class Machine(msgspec.Struct, frozen=True):
    """The machine of a record."""

    system: str
    processor: str
    cores: int
    memory_gib: float
    python: str


def describe_machine() -> Machine:
    """Describe this machine."""
    return Machine(
        system=f"{platform.system()} {platform.release()}",
        processor=_processor(),
        cores=len(psutil.Process().cpu_affinity() or []) or psutil.cpu_count() or 1,
        memory_gib=round(psutil.virtual_memory().total / 2**30, 1),
        python=platform.python_version(),
    )


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the installed `PACKAGES`."""
    found = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def read_commit() -> str | None:
    """Return the commit of this checkout, with a `+` if files are changed; None without git."""
    git = shutil.which("git")
    if git is None:
        return None
    described = subprocess.run(
        [git, "describe", "--always", "--exclude=*", "--dirty=+"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return described.stdout.strip() or None


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
