"""The process of the embedded Triton, which listens on a unix socket that only its user can reach."""

import os
import re
import signal
import stat
import subprocess
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from threading import Thread

import numpy as np

from app.embedded.folder import Device, TritonFolder
from app.embedded.launch import command, environment, shm_prefix
from app.embedded.log_file import LogFile
from app.embedded.service import CheckError
from app.errors import GatewayError, TritonUnavailable
from app.host import seccomp
from app.host.ports import is_free
from app.host.processes import die_with_parent, end_group, kill_group
from app.host.program import CommandError
from app.settings.schema import PREFIX, Settings
from app.telemetry.logging import say
from app.triton.blocking_client import BlockingClient
from app.triton.config_file import unloadable_models
from app.triton.repository import loadable_models
from app.triton.status import ModelDied, own_message

# Triton expects a sign of life from each process of a model every second.
_SILENT = "is not healthy"
_READY_SECONDS = 60.0
_RESTARTS = 3  # of a Triton that is too slow for itself: on a busy machine more than one start may fail
_CHECK_SECONDS = 10.0
_STOP_SECONDS = 10.0
_POLL_SECONDS = 0.1
# A BYTES element with an empty file consists of its length.
_EMPTY_FILE = np.zeros(4, np.uint8)
# Triton's errors when it works, but is overloaded.
_BUSY = ("maximum queue size", "Request timeout expired")
# Reasons of failed model loads in the log; Triton's index does not report them for every model.
# Source: the log of Triton 2.51, the version that `install` pins. Messages are quoted, with escaped line breaks.
_FAILURE = re.compile(
    r"""
    (?: ^\[libprotobuf\ ERROR\ [^\]\n]*\]\ Error\ parsing\ text-format\ inference\.ModelConfig:\ (?P<position>.*)\n )?
    ^E\d.*?\]\ "(?: Poll\ failed\ for\ model\ directory | failed\ to\ load(?:\ model)? )\ '(?P<model>[^']+)'
    (?: \ version\ \d+ )?:\ (?P<reason>.*)"$
    """,
    re.MULTILINE | re.VERBOSE,
)
_LINE_BREAK = r"\n"


class EmbeddedTriton:
    """An embedded Triton."""

    name = "Triton"
    ready_seconds = _READY_SECONDS

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._repository = Path(settings.model_repository).resolve()
        self._folder = TritonFolder(settings)
        self._log = LogFile(Path(settings.triton_home).resolve() / "triton.log")
        self.log = self._log.path
        self._process: subprocess.Popen[bytes] | None = None
        self._tidying = Thread()
        self._client = BlockingClient(f"unix:{self._folder.socket}")
        self.device = Device()
        """What runs the models; the environment for it must be installed."""

    def claim(self) -> None:
        """Reserve the folder of the socket until `stop`; raise CommandError if it, or a TCP port in the settings, is in use."""
        with self._folder.unclaimed_on_error():
            self._folder.claim()
            first = self._settings.triton_ports
            for port in (first, first + 1) if first else ():
                try:
                    if is_free("127.0.0.1", port):
                        continue
                    reason = "it is in use"
                except OSError as error:  # only root may use the lowest ones
                    reason = str(error.strerror)
                raise CommandError(f"Triton cannot listen on port {port}: {reason}; choose others with {PREFIX}TRITON_PORTS")

    def start(self) -> None:
        """Start the server and wait until the default model has returned a result; raise CommandError if it does not."""
        try:
            self.spawn()
            self._wait()
            check_inference(self._client, self._settings.model, _READY_SECONDS)
            unloadable = {model: found.reason for model, found in unloadable_models(self._repository, is_embedded=True).items()}
            for model, reason in (unloadable | self.load_failures()).items():
                say(f"warning: {model} could not be loaded: {reason}")
        except BaseException:
            self.stop()
            raise

    def spawn(self) -> None:
        """Start the server without waiting for it; raise `CommandError` as `claim` does, or if it cannot run on this machine."""
        try:
            with self._folder.unclaimed_on_error():
                self.claim()
                self._sweep()
                self._folder.fill(self.device)
                with self._log.open() as log:
                    self._process = subprocess.Popen(  # noqa: S603 - our own command line
                        command(self._settings, self._folder.path),
                        env=environment(self._folder.path),
                        stdin=subprocess.DEVNULL,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        pass_fds=[self._folder.descriptor],  # locks the folder until Triton, which removes its socket, has ended
                        # Ctrl-C must reach only the supervisor, which stops it after the API. In another session, the
                        # priorities of the API's threads would not count beside Triton (sched_autogroup).
                        process_group=0,
                        preexec_fn=partial(_become_triton, os.getpid()),  # noqa: PLW1509 - takes no lock
                    )
        except (OSError, subprocess.SubprocessError) as error:
            raise CommandError(f"Triton cannot be run here: {error}") from error

    def check(self) -> None:
        """Check that the default model works; if not, Triton hangs, or one of its processes has died."""
        if not (self._folder.is_held() and self._folder.socket.exists()):  # before it listens; later, new workers could not connect
            raise CheckError(f"it does not listen on {self._folder.socket}")
        try:
            check_inference(self._client, self._settings.model, max(_CHECK_SECONDS, 2 * self._settings.timeout_seconds))
        except CheckError as error:
            raise CheckError(str(error), is_final=error.is_final or bool(self._cuda_failure())) from error

    @property
    def pid(self) -> int:
        """Process id; 0 if the server is not running."""
        return 0 if self._process is None else self._process.pid

    def poll(self) -> int | None:
        """Return the exit code; None while the server runs. Call this regularly: it also keeps its log and models in order."""
        self._log.shorten()
        if not self._tidying.is_alive():
            self._tidying = Thread(target=self._folder.drop_removed_models, daemon=True)  # the disk of the models may hang
            self._tidying.start()
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """Kill the server, and remove its files."""
        if self._process is not None:
            kill_group(self._process)
            self._forget()
            if failure := self._cuda_failure():
                self.leave_gpu(failure)

    def stop(self) -> None:
        """Stop the server, by force if necessary, remove its files, and leave its folder to other processes."""
        if self._process is not None:
            # Also kills the stubs, which may otherwise wait forever for a killed server.
            end_group(self._process, _STOP_SECONDS)
            self._forget()
        self._folder.give_up()

    def leave_gpu(self, reason: str) -> None:
        """Run models on the CPU from the next start on, and say why."""
        say(f"Triton does not start with {self.device.gpu}: {reason}; models run on the CPU")
        self.device = Device("", f"it did not start with {self.device.gpu}: {reason}")

    def _cuda_failure(self) -> str:
        """Tell why the default model was not loaded on the GPU; empty if it was, or on the CPU."""
        return self.load_failures().get(self._settings.model, "") if self.device.gpu else ""

    def load_failures(self) -> dict[str, str]:
        """Return the reasons of failed model loads, with the user's paths instead of links."""
        failures = {}
        with suppress(OSError):  # there may have been no room for it
            failures = read_load_failures(self.log)
        links = str(self._folder.path / "models")
        return {model: reason.replace(links, str(self._repository)) for model, reason in failures.items()}

    def _forget(self) -> None:
        self._process = None
        self._sweep()
        self._folder.clear()

    def _wait(self) -> None:
        model, restarts = self._settings.model, 0
        until = time.monotonic() + _READY_SECONDS
        while True:
            failure = ""  # of a busy machine
            # Triton loads its models before it listens, so its first response is final.
            with suppress(TritonUnavailable):
                if self._client.is_ready(model):
                    return
                if restarts == _RESTARTS or _SILENT not in self.load_failures().get(model, ""):
                    break
                failure = f"a process of {model} was silent while Triton started"
            if not failure and (code := self.poll()) is not None:
                if code != -signal.SIGABRT or restarts == _RESTARTS:
                    raise CommandError(f"Triton exited with code {code} while it started; its log is {self.log}")
                failure = "Triton has aborted while it started"  # with boost's lock_exception
            if failure:
                say(f"{failure}; starting it again")
                restarts, until = restarts + 1, time.monotonic() + _READY_SECONDS
                self.kill()
                self.spawn()
                continue
            if time.monotonic() > until:
                raise CommandError(f"{model} was not ready after {_READY_SECONDS:.0f} s; Triton's log is {self.log}")
            time.sleep(_POLL_SECONDS)
        is_there = model in loadable_models(self._repository)
        unknown = "Triton does not tell why" if is_there else f"it is not in {self._repository}"
        raise CommandError(f"{model} could not be loaded: {self.load_failures().get(model, unknown)}; Triton's log is {self.log}")

    def _sweep(self) -> None:
        # Of a previous process, too; other users may make files with such names.
        for path in Path("/dev/shm").glob(f"{shm_prefix(self._settings)}*"):  # noqa: S108 - where Triton puts them
            with suppress(OSError):  # Triton has just removed it
                status = path.lstat()
                if stat.S_ISREG(status.st_mode) and status.st_uid == os.geteuid():
                    path.unlink()


def check_inference(client: BlockingClient, model: str, seconds: float) -> None:
    """Run a model once; raise CheckError if this fails, or an output is empty, which Triton itself does not report."""
    # Without the output `DECODED`, valid encoded files are unknown. Other processes of a model than a dead one may pass a check.
    try:
        spec = client.read_spec(model)
        if spec.dtype is None and not spec.tells_decoded:
            return
        tensor = _EMPTY_FILE if spec.dtype is None else np.zeros(spec.image_shape, spec.dtype)
        outputs = client.infer(spec, tensor, seconds)
    except ModelDied as error:
        raise CheckError(f"a process of {model} has died", is_final=True) from error
    except GatewayError as error:
        reason = own_message(error)
        if any(busy in reason for busy in _BUSY):
            return
        raise CheckError(f"the inference of {model} failed: {reason}") from error
    if empty := [name for name, content in outputs.items() if not content]:
        raise CheckError(f"the inference of {model} returned empty {', '.join(empty)}")


def _become_triton(parent: int) -> None:
    # Triton's Python backend makes its files in /dev/shm readable for everybody: they contain images.
    os.umask(0o077)
    with suppress(OSError):
        seccomp.answer(["fchmod"], 0)
    die_with_parent(parent)


def read_load_failures(log: Path) -> dict[str, str]:
    """Return a one-line reason for each model that could not be loaded, from Triton's log."""
    failures = {}
    for found in _FAILURE.finditer(log.read_text(encoding="utf-8", errors="replace")):
        reason = found["reason"].partition(_LINE_BREAK)[0].rstrip(".")
        failures[found["model"]] = f"{reason} ({found['position'].rstrip('.')})" if found["position"] else reason
    return failures
