"""Programs that are not Python packages, and that tests run."""

import os
import shutil

import pytest


def require_program(name: str, package: str) -> str:
    """Return the path of a program; without it skip the test or, under CI, which installs it, fail."""
    path = shutil.which(name) or shutil.which(name, path="/usr/sbin")  # which is not in every user's path
    if path is None:
        message = f"{name} is not installed; on Debian: apt-get install {package}"
        if os.environ.get("CI"):
            pytest.fail(message)
        pytest.skip(message)
    return path
