"""Starting, watching and stopping the Triton that comes with Nereid; it listens on loopback only."""

import ctypes
import errno
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from contextlib import suppress
from pathlib import Path
from urllib.error import HTTPError

import numpy as np

from app import contract
from app.bundle import libpython_folder
from app.config import Settings
from app.contract import Form
from app.errors import UnsupportedLayout

RUNNER = Path(__file__).with_name("onnx_runner.py")
CONFIG_NAME = "embedded"

_READY_SECONDS = 15.0
_STOP_SECONDS = 10.0
_PR_SET_PDEATHSIG = 1

# Loopback is never behind the proxy that the environment may name.
_LOOPBACK = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EmbeddedError(Exception):
    """The embedded Triton cannot be run; the message is one line for the person at the terminal."""


class Server:
    """One running embedded Triton."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._home = Path(settings.triton_home).resolve()
        self.log = self._home / f"triton-{settings.triton_grpc_port}.log"
        # Only one Triton can have the port, so what bears its number and is there before it starts is stale.
        self._shm_prefix = f"nereid_{settings.triton_grpc_port}_"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it and wait until the default model has answered.

        Raises:
            EmbeddedError: A port is taken, a path has a space in it, or it did not become ready; the message names its log.
        """
        settings = self._settings
        for folder in (self._home, Path(settings.model_repository).resolve()):
            if " " in str(folder):
                raise EmbeddedError(f"Triton's Python backend cannot run from a path with a space in it: {folder}")
        for port in (settings.triton_http_port, settings.triton_grpc_port, settings.triton_metrics_port):
            if not is_free("127.0.0.1", port):
                raise EmbeddedError(f"port {port} is in use; stop what uses it or choose others with NEREID_TRITON_*_PORT")
        self._sweep()
        try:
            if self.log.exists():  # it may tell why the last one died
                self.log.replace(self.log.with_suffix(".log.1"))
            with self.log.open("wb") as log:
                self._process = subprocess.Popen(  # noqa: S603 - our own command line
                    self._command(),
                    env=self._environment(),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,  # a Ctrl-C is for us; we stop it when the API has ended
                    preexec_fn=die_with_parent,  # noqa: PLW1509 - no threads here
                )
        except OSError as error:
            raise EmbeddedError(f"Triton cannot be run here: {error}") from error
        try:
            self._wait()
            _first_inference(settings.triton_http_port, settings.model)
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """Its process id; 0 when it does not run."""
        return 0 if self._process is None else self._process.pid

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return None if self._process is None else self._process.poll()

    def stop(self) -> None:
        """End it, by force if it does not end by itself, and leave nothing behind."""
        if self._process is None:
            return
        self._process.terminate()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(_STOP_SECONDS)
        with suppress(ProcessLookupError):  # a stub whose server was killed may wait for it for ever
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process = None
        self._sweep()

    def _command(self) -> list[str]:
        settings, triton = self._settings, self._home / "server" / "pytriton" / "tritonserver"
        runner = triton / "backends" / "onnxruntime"
        runner.mkdir(exist_ok=True)
        shutil.copyfile(RUNNER, runner / "model.py")
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
        loads = [f"--load-model={name}" for name in loadable(Path(settings.model_repository))]
        program = str(triton / "bin" / "tritonserver")
        return [program, "--disable-auto-complete-config", *(f"--{name}={value}" for name, value in options.items()), *loads]

    def _environment(self) -> dict[str, str]:
        libraries = [self._home / "server" / "nvidia_pytriton.libs", libpython_folder()]
        return {
            **os.environ,
            "LD_LIBRARY_PATH": ":".join(str(folder) for folder in libraries if folder),
            # The stub takes the packages of the python3 that it finds first; PYTHONPATH would not do.
            "PATH": f"{self._home / 'python' / 'bin'}:{os.environ.get('PATH', '')}",
        }

    def _wait(self) -> None:
        until = time.monotonic() + _READY_SECONDS
        url = f"http://127.0.0.1:{self._settings.triton_http_port}/v2/models/{self._settings.model}/ready"
        while time.monotonic() < until:
            if self.poll() is not None:
                raise EmbeddedError(f"Triton ended with code {self.poll()} while it started; its log is {self.log}")
            try:
                with _LOOPBACK.open(url, timeout=1):
                    return
            except HTTPError as error:  # models are loaded before it listens, so this is its last word
                error.close()
                raise EmbeddedError(f"{self._settings.model} could not be loaded; Triton's log is {self.log}") from error
            except OSError:
                time.sleep(0.1)
        raise EmbeddedError(f"{self._settings.model} was not ready after {_READY_SECONDS:.0f} s; Triton's log is {self.log}")

    def _sweep(self) -> None:
        for left in Path("/dev/shm").glob(f"{self._shm_prefix}*"):  # noqa: S108 - where Triton puts them
            left.unlink(missing_ok=True)


def loadable(repository: Path) -> list[str]:
    """Name the models that have a config and at least one version with a file in it."""
    names = []
    for folder in sorted(repository.iterdir()) if repository.is_dir() else []:
        has_config = any((folder / config).is_file() for config in ("config.pbtxt", f"configs/{CONFIG_NAME}.pbtxt"))
        if has_config and any(path.parent.name.isdigit() for path in folder.glob("*/*")):
            names.append(folder.name)
    return names


def is_free(host: str, port: int) -> bool:
    """Tell whether a server could listen on the port.

    Raises:
        OSError: The host is no address of this machine.
    """
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                return False
            raise
    return True


def die_with_parent(how: signal.Signals = signal.SIGTERM) -> None:
    """Ask the kernel to send this process a signal when its parent ends, however that ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, how)


def _first_inference(http_port: int, model: str) -> None:
    """Run the model once, over HTTP: a backend that returns empty tensors says nothing of it.

    Raises:
        EmbeddedError: It failed, or an output is empty.
    """
    base = f"http://127.0.0.1:{http_port}/v2/models/{model}"
    try:
        with _LOOPBACK.open(f"{base}/config", timeout=5) as answer:
            known = contract.read(json.load(answer), "1")
        if known.form is Form.FILE:
            return  # what it takes for a picture is its own matter
        tensor = np.zeros(known.shape, known.dtype)
        kinds = {np.uint8: "UINT8", np.float16: "FP16", np.float32: "FP32"}
        question = {
            "inputs": [
                {
                    "name": known.input,
                    "shape": tensor.shape,
                    "datatype": kinds[tensor.dtype.type],
                    "parameters": {"binary_data_size": tensor.nbytes},
                }
            ],
            "outputs": [{"name": name, "parameters": {"binary_data": True}} for name in known.outputs],
        }
        header = json.dumps(question).encode()
        request = urllib.request.Request(  # noqa: S310
            f"{base}/infer", header + tensor.tobytes(), {"Inference-Header-Content-Length": str(len(header))}
        )
        with _LOOPBACK.open(request, timeout=_READY_SECONDS) as answer:
            length = int(answer.headers["Inference-Header-Content-Length"])
            outputs = json.loads(answer.read()[:length])["outputs"]
    except (OSError, UnsupportedLayout) as error:
        if isinstance(error, HTTPError):
            error.close()
        raise EmbeddedError(f"the start-up inference of {model} failed: {error}") from error
    empty = [output["name"] for output in outputs if not output["parameters"]["binary_data_size"]]
    if empty:
        raise EmbeddedError(f"the start-up inference of {model} returned empty {', '.join(empty)}")
