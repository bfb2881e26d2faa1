"""Command line, environment and access restrictions of the embedded Triton."""

import os
from pathlib import Path

from app.embedded.install import libpython_folder
from app.settings.schema import TRITON_SOCKET, Settings
from app.settings.task_models import default_models
from app.triton.control_key import HEADER
from app.triton.repository import CONFIG_NAME

BACKEND = Path(__file__).with_name("onnx_model.py")
MODULES = (
    "__init__.py",
    "errors.py",
    "embedded/__init__.py",
    "embedded/bytes_tensor.py",
    "embedded/cpu_session.py",
    "embedded/file_input.py",
    "embedded/inference_lock.py",
    "embedded/onnx_backend.py",
    "host/__init__.py",
    "host/cgroup.py",
    "host/cores.py",
    "host/memory.py",
    "host/program.py",
    "imaging/*.py",
    "model/*.py",
)
"""Modules of this package that run inside Triton; `deploy/binary` includes their source."""

_PACKAGE = Path(__file__).parents[1]
# Trace only requests with a `traceparent`. Triton also reads the variables `OTEL_*`.
_TRACING = ("--trace-config=mode=opentelemetry", "--trace-config=rate=0", "--trace-config=level=TIMESTAMPS")
# Other users of the machine must not reach the parts of Triton's API that change the server: with them, they could, for example,
# access its memory. HTTP cannot transmit this key.
_TCP = {
    "model-control-mode": "none",
    "http-address": "127.0.0.1",
    "metrics-address": "127.0.0.1",
    "http-restricted-api": f"model-repository,shared-memory,trace,logging:{HEADER}=\n",
}
# Loading a model can run code: only this user may do so, through the socket.
_NO_TCP = {"model-control-mode": "explicit", "allow-http": "false", "allow-metrics": "false"}


def write_backend(home: Path) -> Path:
    """Write this version's backend to the server in `home`, unless it is there; return the folder of all backends."""
    backends = home / "server" / "pytriton" / "tritonserver" / "backends"
    backend = backends / "onnxruntime"
    for source in [path for pattern in MODULES for path in _PACKAGE.glob(pattern)]:
        module = backend / _PACKAGE.name / source.relative_to(_PACKAGE)
        module.parent.mkdir(parents=True, exist_ok=True)
        _replace(module, source.read_bytes())
    _replace(backend / "model.py", BACKEND.read_bytes())
    return backends


def command(settings: Settings, folder: Path) -> list[str]:
    """Return the command line of the server, whose links and socket are in `folder`; write this version's backend there."""
    backends = write_backend(folder)
    address, _, number = TRITON_SOCKET.partition(":")
    port = settings.triton_ports
    options = {
        "model-repository": folder / "models",
        "model-config-name": CONFIG_NAME,
        "backend-directory": backends,
        "backend-config": f"python,shm-region-prefix-name={shm_prefix(settings)}",
        "exit-on-error": "false",
        "exit-timeout-secs": "5",
        "allow-gpu-metrics": "false",
        "grpc-address": f"unix:{folder / address}",
        "grpc-port": number,
        **(_TCP | {"http-port": port, "metrics-port": port + 1} if port else _NO_TCP),
    }
    models = ["*"]
    if settings.loaded_models:  # the others are loaded on demand
        models = sorted({*default_models(settings).values()} & {path.name for path in (folder / "models").iterdir()})
    load = [] if port else [f"--load-model={model}" for model in models]
    return [
        str(backends.with_name("bin") / "tritonserver"),
        "--disable-auto-complete-config",
        *(f"--{name}={value}" for name, value in options.items()),
        *load,
        *(_TRACING if settings.tracing else ()),
    ]


def environment(folder: Path) -> dict[str, str]:
    """Return the environment of the server."""
    libraries = [folder / "server" / "nvidia_pytriton.libs", libpython_folder()]
    return {
        **os.environ,
        "LD_LIBRARY_PATH": ":".join(str(path) for path in libraries if path),
        # The stub uses the packages of the first python3 in PATH and ignores PYTHONPATH.
        "PATH": f"{folder / 'python' / 'bin'}:{os.environ.get('PATH', '')}",
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",  # in which nvidia-smi names them
        "ORT_DISABLE_TELEMETRY": "1",  # otherwise ONNX Runtime writes a session id to the temporary folder
    }


def shm_prefix(settings: Settings) -> str:
    """Return the prefix of Triton's files in /dev/shm, unique as its folder."""
    return f"{settings.triton_folder.name.replace('-', '_')}_"


def _replace(path: Path, content: bytes) -> None:
    # At once, because a running Triton of the same installation may read it.
    if path.is_file() and path.read_bytes() == content:
        return
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_bytes(content)
    written.replace(path)
