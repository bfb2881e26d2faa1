"""Install the embedded Triton.

A PyPI wheel contains a complete Triton without GPU support. It is unpacked next to a separate Python environment for the models,
which need onnxruntime but none of the application's dependencies.
"""

import ctypes.util
import hashlib
import shutil
import zipfile
from contextlib import suppress
from pathlib import Path

from app.embedded.building import building, is_complete, lock
from app.host import interpreter
from app.host.interpreter import Interpreter
from app.host.packages import download_wheel, make_environment, verify_sha256
from app.host.program import CommandError
from app.telemetry.logging import say

WHEEL = "nvidia-pytriton==0.7.0"
WHEEL_SHA256 = "21f063ff93bb426d0c06b7a55e7eb9efcfe62c0dddd9a908e9877e18710128df"
CPU_FOLDER, GPU_FOLDER = "python", "python-gpu"
"""Names of the environments in which models run."""
REQUIREMENTS = {
    CPU_FOLDER: Path(__file__).with_name("requirements.txt"),
    GPU_FOLDER: Path(__file__).with_name("requirements_gpu.txt"),
}
DOWNLOAD = "1.6 GB"
"""Size of the wheels of the environment for a GPU: ONNX Runtime and CUDA's libraries."""

_LIBPYTHON = "libpython{}.so.1.0"


def install(home: Path, *, for_gpu: bool = False) -> None:
    """Install the server, the environment of its Python backend and, if asked for, the one for a GPU in `home`.

    This happens once for all processes. It raises CommandError.
    """
    libpython_folder()
    server, server_tag = home / "server", f"{WHEEL_SHA256} {_python().version}"
    environments = [home / CPU_FOLDER, *([home / GPU_FOLDER] if for_gpu else [])]
    if is_complete(server, server_tag) and all(is_complete(each, tag_of(each)) for each in environments):
        return
    with lock(home):
        # Checked again, because another process may have installed them meanwhile.
        if not is_complete(server, server_tag):
            say(f"getting {WHEEL} (Triton Inference Server, 55 MB)")
            with building(server, server_tag) as folder:
                wheel = download_wheel(WHEEL, folder)
                verify_sha256(wheel, WHEEL_SHA256)
                _unpack(wheel, folder)
        for environment in environments:
            if not is_complete(environment, tag_of(environment)):
                size = f" for a GPU, {DOWNLOAD}" if environment.name == GPU_FOLDER else ""
                say(f"creating the environment of Triton's Python backend{size}")
                with building(environment, tag_of(environment)) as folder:
                    make_environment(folder, REQUIREMENTS[environment.name], _python().path)


def has_gpu_environment(home: Path) -> bool:
    """Return whether the environment for a GPU is installed in `home`; the one-file program may be without a Python for it."""
    with suppress(CommandError):
        return is_complete(home / GPU_FOLDER, tag_of(home / GPU_FOLDER))
    return False


def tag_of(environment: Path) -> str:
    """Return the tag of a complete environment: its requirements and the version of Python."""
    return f"{hashlib.sha256(REQUIREMENTS[environment.name].read_bytes()).hexdigest()} {_python().version}"


def _unpack(wheel: Path, folder: Path) -> None:
    triton = "pytriton/tritonserver"
    stub = f"{triton}/python_backend_stubs/{_python().version}/triton_python_backend_stub"
    wanted = (f"{triton}/bin/", f"{triton}/backends/python/", "nvidia_pytriton.libs/", "nvidia_pytriton-0.7.0.dist-info/", stub)
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(folder, [name for name in archive.namelist() if name.startswith(wanted)])
    wheel.unlink()
    backends = folder / triton / "backends"
    shutil.move(folder / stub, backends / "python")
    for program in (backends / "python" / Path(stub).name, folder / triton / "bin" / "tritonserver"):
        program.chmod(0o755)
    _use_own_libpython(folder / "nvidia_pytriton.libs")


def _use_own_libpython(libraries: Path) -> None:
    # The stub for Python 3.13 is linked to the one in the wheel, which is not compatible with every standard library of the same
    # version: Debian's, for example, expects a built-in `_datetime`.
    own, version = libpython_folder(), _python().version
    for bundled in libraries.glob(f"libpython3-*.{version.removeprefix('3.')}.so.1.0"):
        if own is not None:
            bundled.unlink()
            bundled.symlink_to(own / _LIBPYTHON.format(version))


def libpython_folder() -> Path | None:
    """Return the folder of the libpython that the stub needs, None if the loader finds it; raise CommandError if there is none."""
    python = _python()
    name = _LIBPYTHON.format(python.version)
    found = next((folder for folder in python.library_folders if (folder / name).is_file()), None)
    if found is None and ctypes.util.find_library(f"python{python.version}") is None:
        raise CommandError(f"{name} is missing; on Debian run: apt-get install libpython{python.version}")
    return found


def _python() -> Interpreter:
    return interpreter.find("the embedded Triton", "name another Triton with --triton")
