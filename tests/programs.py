"""Programs that are not Python packages, and that tests run."""

import os
import shutil

import pytest


def require_program(name: str, package: str) -> str:
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin")  # which is not in every user's path
    if path is None:
        pytest.skip(f"{name} is not installed; on Debian: apt-get install {package}")
    return path


def obeying_modes() -> list[str]:
    """Return what precedes a command so that the modes of files are binding for it, even if root runs it."""
    return [] if os.getuid() else [require_program("setpriv", "util-linux"), "--bounding-set=-dac_override,-dac_read_search"]
