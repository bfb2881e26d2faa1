"""The process of the embedded Triton, which listens only on loopback."""

import os
import secrets
import stat
import subprocess
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from app.embedded import links
from app.embedded.inference_check import check_inference
from app.embedded.launch import NO_KEY, command, environment, loadable_models, restrict, shm_prefix
from app.embedded.load_failures import read_load_failures
from app.embedded.service import CheckError, StartError
from app.host import private_argument
from app.host.ports import is_free, is_listening
from app.host.processes import die_with_parent, end_group, kill_group, wait_for_answer
from app.settings.schema import PREFIX, Settings
from app.telemetry.logging import say

_READY_SECONDS = 60.0
_CHECK_SECONDS = 10.0
_STOP_SECONDS = 10.0


class EmbeddedTritonError(StartError):
    """The embedded Triton cannot be run; the message is one line for the user."""


def require_ports(settings: Settings) -> None:
    """Check that the ports of the embedded Triton are free.

    Raises:
        EmbeddedTritonError: A port is in use; the message names its setting.
    """
    for name in ("triton_http_port", "triton_grpc_port", "triton_metrics_port"):
        port = getattr(settings, name)
        if not is_free("127.0.0.1", port):
            raise EmbeddedTritonError(f"port {port} is in use; stop what uses it or choose another with {PREFIX}{name.upper()}")


class EmbeddedTriton:
    """An embedded Triton."""

    name = "Triton"
    ready_seconds = _READY_SECONDS

    def __init__(self, settings: Settings, key: str = "") -> None:
        """Prepare the server without starting it.

        Args:
            settings: The settings with its ports, folders and default model.
            key: Key of its controls over gRPC, to share one between several Tritons; empty for a new key at each start.
        """
        self._settings = settings
        self._shared_key = key
        self._home = Path(settings.triton_home).resolve()
        self._repository = Path(settings.model_repository).resolve()
        self._links = self._home
        self.log = self._home / f"triton-{settings.triton_grpc_port}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._key_path = self._home / f"control-{settings.triton_grpc_port}.key"
        self._key = ""
        self._has_warned = False

    def start(self) -> None:
        """Start the server and wait until the default model has returned a result.

        Raises:
            EmbeddedTritonError: As for `spawn`; or it did not become ready, with its log in the message.
        """
        process = self.spawn()
        try:
            self._wait(process)
            check_inference(self._settings.triton_http_port, self._settings.model, _READY_SECONDS)
            self._publish_key()
            self._warn_of_failed_models()
        except CheckError as error:
            self.stop()
            raise EmbeddedTritonError(str(error)) from error
        except BaseException:
            self.stop()
            raise

    def spawn(self) -> "subprocess.Popen[bytes]":
        """Start the server without waiting for it.

        Raises:
            EmbeddedTritonError: A port is in use, or the server cannot run on this machine.
        """
        require_ports(self._settings)
        try:
            self._sweep()
            with self._open_log() as log:
                self._process = self._spawn(log)
                return self._process
        except (OSError, subprocess.SubprocessError) as error:
            self._sweep()
            raise EmbeddedTritonError(f"Triton cannot be run here: {error}") from error

    def check(self) -> None:
        """Check that the default model works.

        Raises:
            CheckError: The inference failed: Triton hangs, or one of its processes has died.
        """
        settings = self._settings
        check_inference(settings.triton_http_port, settings.model, max(_CHECK_SECONDS, 2 * settings.timeout_seconds))
        self._publish_key()

    @property
    def pid(self) -> int:
        """Process id; 0 if the server is not running."""
        return 0 if self._process is None else self._process.pid

    def poll(self) -> int | None:
        """Return the exit code; None while the server runs."""
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """Kill the server and remove its files."""
        if self._process is not None:
            kill_group(self._process)
            self._forget()

    def stop(self) -> None:
        """Stop the server, by force if necessary, and remove its files."""
        if self._process is None:
            return
        # Also kills the stubs, which may otherwise wait forever for a killed server.
        end_group(self._process, _STOP_SECONDS)
        self._forget()

    def _forget(self) -> None:
        """Remove the files of the ended process."""
        self._process = None
        self._sweep()

    def _open_log(self) -> IO[bytes]:
        """Begin a log, and keep the last one, which may tell why its Triton ended; without room for one, Triton has none."""
        try:
            if self.log.exists():
                self.log.replace(self.log.with_suffix(".log.1"))
            return self.log.open("wb")
        except OSError as error:
            say(f"warning: {self.log} cannot be written: {error.strerror}")
            return Path(os.devnull).open("wb")

    def _spawn(self, log: IO[bytes]) -> "subprocess.Popen[bytes]":
        """Start the process, with a key for its controls over gRPC."""
        self._links = links.make(self._settings, self._home)
        options: dict[str, Any] = {
            "env": environment(self._links),
            "stdin": subprocess.DEVNULL,
            "stdout": log,
            "stderr": subprocess.STDOUT,
            "start_new_session": True,  # Ctrl-C must reach only the supervisor, which stops it after the API
            "preexec_fn": partial(die_with_parent, os.getpid()),
        }
        line = command(self._settings, self._links)
        self._key = self._shared_key or secrets.token_hex(32)
        self._has_warned = False
        try:
            return private_argument.start(line, restrict("grpc-restricted-protocol", self._key), **options)
        except (OSError, subprocess.SubprocessError):
            process = subprocess.Popen([*line, restrict("grpc-restricted-protocol", NO_KEY)], **options)  # noqa: S603
        say("warning: this machine does not allow a private argument; shared memory with Triton is not available, and other users")
        say("of this machine may be able to change what Triton maps, traces and logs")
        self._key = ""
        return process

    def _publish_key(self) -> None:
        """Write the key for the gateway, after verifying that this Triton is the program that listens on the gRPC port.

        Without room for its file, tensors travel in the requests until a later check finds room.

        Raises:
            CheckError: Another program listens on the port.
        """
        if self._key_path.exists():
            return
        if not is_listening(self.pid, self._settings.triton_grpc_port):
            raise CheckError(f"another program listens on port {self._settings.triton_grpc_port}")
        for file in self._files():  # they contain images of requests, and Triton makes them readable for all users
            with suppress(FileNotFoundError):  # Triton has just removed it
                file.chmod(0o600)
        written = self._key_path.with_suffix(".new")
        try:
            written.unlink(missing_ok=True)
            with os.fdopen(os.open(written, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "w", encoding="ascii") as key_file:
                key_file.write(self._key)
            written.replace(self._key_path)
        except OSError as error:
            if not self._has_warned:
                say(f"warning: {self._key_path} cannot be written: {error.strerror}; until it can, tensors travel in the requests")
            self._has_warned = True

    def _wait(self, process: "subprocess.Popen[bytes]") -> None:
        model = self._settings.model
        # Triton loads its models before it listens, so its first response is final.
        status = wait_for_answer(
            f"http://127.0.0.1:{self._settings.triton_http_port}/v2/models/{model}/ready", process, _READY_SECONDS
        )
        if status == 200:  # noqa: PLR2004
            return
        if status is not None:
            is_there = model in loadable_models(self._repository)
            unknown = "Triton does not tell why" if is_there else f"it is not in {self._repository}"
            raise EmbeddedTritonError(
                f"{model} could not be loaded: {self._load_failures().get(model, unknown)}; Triton's log is {self.log}"
            )
        if process.poll() is not None:
            raise EmbeddedTritonError(f"Triton exited with code {process.poll()} while it started; its log is {self.log}")
        raise EmbeddedTritonError(f"{model} was not ready after {_READY_SECONDS:.0f} s; Triton's log is {self.log}")

    def _warn_of_failed_models(self) -> None:
        for model, reason in self._load_failures().items():
            say(f"warning: {model} could not be loaded: {reason}")

    def _load_failures(self) -> dict[str, str]:
        """Return the reasons of failed model loads, with the user's paths instead of links."""
        failures = {}
        with suppress(OSError):  # there may have been no room for it
            failures = read_load_failures(self.log)
        return {model: reason.replace(str(self._links / "models"), str(self._repository)) for model, reason in failures.items()}

    def _sweep(self) -> None:
        links.remove(self._settings, self._home)
        for leftover in (self._key_path, *self._files()):
            with suppress(OSError):  # the folder may be read-only
                leftover.unlink()

    def _files(self) -> list[Path]:
        """Return the shared memory files of this process or a previous one; other users may make files with such names."""
        files = []
        for path in Path("/dev/shm").glob(f"{shm_prefix(self._settings)}*"):  # noqa: S108 - where Triton puts them
            with suppress(FileNotFoundError):  # Triton has just removed it
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    files.append(path)
        return files
