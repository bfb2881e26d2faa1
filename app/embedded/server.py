"""The process of the embedded Triton; it listens on loopback only."""

import os
import subprocess
from pathlib import Path

from app.config import Settings
from app.embedded.install import libpython_folder
from app.embedded.startup_check import StartupCheckError, check_inference
from app.host.ports import is_free
from app.host.processes import die_with_parent, end_group, wait_for_answer

BACKEND = Path(__file__).with_name("onnx_backend.py")
CONFIG_NAME = "embedded"

_READY_SECONDS = 15.0
_STOP_SECONDS = 10.0


class EmbeddedTritonError(Exception):
    """The embedded Triton cannot be run; the message is one line for the user."""


class EmbeddedTriton:
    """One embedded Triton, running or not."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._home = Path(settings.triton_home).resolve()
        self.log = self._home / f"triton-{settings.triton_grpc_port}.log"
        # Only one Triton can have the port, so anything with its number that exists before the start is a leftover.
        self._shm_prefix = f"nereid_{settings.triton_grpc_port}_"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until the default model has answered.

        Raises:
            EmbeddedTritonError: A port is in use, a path contains a space, or it did not become ready; the message names its log.
        """
        settings = self._settings
        for folder in (self._home, Path(settings.model_repository).resolve()):
            if " " in str(folder):
                raise EmbeddedTritonError(f"Triton's Python backend cannot run from a path with a space in it: {folder}")
        for port in (settings.triton_http_port, settings.triton_grpc_port, settings.triton_metrics_port):
            if not is_free("127.0.0.1", port):
                raise EmbeddedTritonError(f"port {port} is in use; stop what uses it or choose others with NEREID_TRITON_*_PORT")
        self._sweep()
        try:
            if self.log.exists():  # it may tell why the last one ended
                self.log.replace(self.log.with_suffix(".log.1"))
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603 - our own command line
                    self._command(),
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C reaches only us; we stop it after the API
                    preexec_fn=die_with_parent,  # noqa: PLW1509 - there are no threads here
                )
        except OSError as error:
            raise EmbeddedTritonError(f"Triton cannot be run here: {error}") from error
        try:
            self._wait(self._process)
            check_inference(settings.triton_http_port, settings.model, _READY_SECONDS)
        except StartupCheckError as error:
            self.stop()
            raise EmbeddedTritonError(str(error)) from error
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Process id; 0 if it does not run."""
        return 0 if self._process is None else self._process.pid

    def poll(self) -> int | None:
        """Return its exit code; None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """End it, by force if necessary, and leave nothing behind."""
        if self._process is None:
            return
        # Kills the stubs, too: one whose server was killed may wait for it for ever.
        end_group(self._process, _STOP_SECONDS)
        self._process = None
        self._sweep()

    def _command(self) -> list[str]:
        settings, triton = self._settings, self._home / "server" / "pytriton" / "tritonserver"
        backend = triton / "backends" / "onnxruntime"
        backend.mkdir(exist_ok=True)
        _replace(backend / "model.py", BACKEND.read_bytes())
        options = {
            "model-repository": str(Path(settings.model_repository).resolve()),
            "model-config-name": CONFIG_NAME,
            "model-control-mode": "explicit",
            "backend-directory": str(triton / "backends"),
            "backend-config": f"python,shm-region-prefix-name={self._shm_prefix}",
            "exit-on-error": "false",
            "exit-timeout-secs": "5",
            "allow-gpu-metrics": "false",
            "http-address": "127.0.0.1",
            "http-port": str(settings.triton_http_port),
            "grpc-address": "127.0.0.1",
            "grpc-port": str(settings.triton_grpc_port),
            "metrics-address": "127.0.0.1",
            "metrics-port": str(settings.triton_metrics_port),
        }
        loads = [f"--load-model={name}" for name in loadable_models(Path(settings.model_repository))]
        program = str(triton / "bin" / "tritonserver")
        return [program, "--disable-auto-complete-config", *(f"--{name}={value}" for name, value in options.items()), *loads]

    def _environment(self) -> dict[str, str]:
        libraries = [self._home / "server" / "nvidia_pytriton.libs", libpython_folder()]
        return {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join(str(folder) for folder in libraries if folder),
            # The stub uses the packages of the first python3 in PATH; it ignores PYTHONPATH.
            "PATH": f"{self._home / 'python' / 'bin'}:{os.environ.get('PATH', '')}",
        }

    def _wait(self, process: "subprocess.Popen[bytes]") -> None:
        model = self._settings.model
        # Triton loads its models before it listens, so that its first answer is final.
        status = wait_for_answer(
            f"http://127.0.0.1:{self._settings.triton_http_port}/v2/models/{model}/ready", process, _READY_SECONDS
        )
        if status == 200:  # noqa: PLR2004
            return
        if status is not None:
            raise EmbeddedTritonError(f"{model} could not be loaded; Triton's log is {self.log}")
        if process.poll() is not None:
            raise EmbeddedTritonError(f"Triton exited with code {process.poll()} while it started; its log is {self.log}")
        raise EmbeddedTritonError(f"{model} was not ready after {_READY_SECONDS:.0f} s; Triton's log is {self.log}")

    def _sweep(self) -> None:
        for leftover in Path("/dev/shm").glob(f"{self._shm_prefix}*"):  # noqa: S108 - where Triton puts them
            leftover.unlink(missing_ok=True)


def loadable_models(repository: Path) -> list[str]:
    """Return the names of the models that have a config and at least one version with a file in it."""
    names = []
    for folder in sorted(repository.iterdir()) if repository.is_dir() else []:
        has_config = any((folder / config).is_file() for config in ("config.pbtxt", f"configs/{CONFIG_NAME}.pbtxt"))
        if has_config and any(path.parent.name.isdigit() for path in folder.glob("*/*")):
            names.append(folder.name)
    return names


def _replace(path: Path, content: bytes) -> None:
    """Write a file that a running Triton of the same installation may be reading."""
    if path.is_file() and path.read_bytes() == content:
        return
    written = path.with_name(f".{path.name}.{os.getpid()}")
    written.write_bytes(content)
    written.replace(path)
