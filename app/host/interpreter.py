"""The Python to run: this one or, for the one-file program, one on this machine."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
from functools import cache
from pathlib import Path
from typing import NamedTuple

from app.host import program
from app.host.program import CommandError

_NAMES = ("python3.13", "python3.12", "python3.11", "python3")
_SECONDS = 30.0
_VERSIONS = ("3.11", "3.12", "3.13")
# Debian has separate packages for `pip` and `venv`.
_DESCRIBE = """
import ensurepip, json, pip, sys, sysconfig, venv
folders = sysconfig.get_config_vars("LIBDIR", "LIBPL")
print(json.dumps(["%d.%d" % sys.version_info[:2], *filter(None, folders), sys.base_prefix + "/lib"]))
"""


class Interpreter(NamedTuple):
    """A Python interpreter."""

    path: str
    version: str
    """Major and minor version: `3.11`."""
    library_folders: list[Path]
    """Folders that may contain its libpython."""


def find(user: str, otherwise: str) -> Interpreter:
    """Return this Python; for the one-file program, the newest one in PATH with pip and venv, or raise CommandError."""
    found = _search(os.environ.get("PATH", os.defpath)) if program.IS_ONE_FILE else _this_one()
    if found is None:
        raise CommandError(
            f"{user} needs Python 3.11, 3.12 or 3.13 with pip and venv, and none is in PATH; on Debian run: "
            f"apt-get install python3-pip python3-venv; otherwise {otherwise}"
        )
    return found


def _this_one() -> Interpreter:
    folders = [folder for folder in sysconfig.get_config_vars("LIBDIR", "LIBPL") if folder] + [f"{sys.base_prefix}/lib"]
    return Interpreter(sys.executable, f"{sys.version_info.major}.{sys.version_info.minor}", list(map(Path, folders)))


@cache
def _search(places: str) -> Interpreter | None:
    for path in filter(None, (shutil.which(name, path=places) for name in _NAMES)):
        # -I isolates it from the current folder and the environment.
        command = [path, "-I", "-c", _DESCRIBE]
        try:
            version, *folders = json.loads(subprocess.check_output(command, stderr=subprocess.DEVNULL, timeout=_SECONDS))  # noqa: S603 - found in PATH
        except (OSError, subprocess.SubprocessError, ValueError):  # it cannot be run, or is not a suitable Python
            continue
        if version in _VERSIONS:
            return Interpreter(path, version, list(map(Path, folders)))
    return None
