"""Programs that are not Python packages, and that tests run."""

import shutil

import pytest


def require_program(name: str, package: str) -> str:
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin")  # which is not in every user's path
    if path is None:
        pytest.skip(f"{name} is not installed; on Debian: apt-get install {package}")
    return path
