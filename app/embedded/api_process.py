"""One instance of the API as a child process."""

import os
import signal
import subprocess
from functools import partial
from pathlib import Path

from app.embedded.service import CheckError, StartError
from app.host import cores, program
from app.host.http import get_status
from app.host.processes import SUPERVISED, die_with_parent, kill_group
from app.resilience import last_valid, worker_table
from app.settings.schema import PREFIX, Settings

_READY_SECONDS = 120.0
_CHECK_SECONDS = 5.0
_OK = 200


class ApiProcess:
    """An instance of the API."""

    ready_seconds = _READY_SECONDS
    is_always_checked = False  # it supervises its workers itself

    def __init__(self, settings: Settings, socket: Path | None = None) -> None:
        """Prepare an instance that listens on a unix socket, or on host and port if `socket` is None."""
        self.name = "the API" if socket is None else f"instance {socket.name}"
        self.socket = socket
        self.url = settings.local_url
        workers = cores.workers(settings.workers, settings.instances)
        self._environment = {f"{PREFIX}SOCKET": str(socket), f"{PREFIX}WORKERS": str(workers)} if socket else {}
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> None:
        """Start the instance.

        Raises:
            StartError: The process cannot be created.
        """
        inherited = [worker_table.create(), last_valid.create()]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line
                program.command("app", "api"),
                env={**program.environment(), SUPERVISED: "1", **self._environment},
                pass_fds=inherited,
                start_new_session=True,  # Ctrl-C must reach only the supervisor
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - takes no lock
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise StartError(str(error)) from error

    def poll(self) -> int | None:
        """Return the exit code; None while the instance runs, or before it is started."""
        return None if self._process is None else self._process.poll()

    @property
    def is_running(self) -> bool:
        """Whether the instance was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Check that the instance responds.

        Raises:
            CheckError: It does not respond.
        """
        status = get_status(f"{self.url}/livez", _CHECK_SECONDS, self.socket)
        if status != _OK:
            raise CheckError("it does not answer")

    def drain(self, number: int) -> None:
        """Forward the signal that stops the service; the instance ends when its requests have ended."""
        if self._process is not None:
            self._process.send_signal(number)

    def renew_workers(self) -> None:
        """Make the instance replace its workers one by one."""
        if self.is_running and self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """Kill the instance and its workers."""
        if self._process is not None:
            kill_group(self._process)
            self._process = None
            if self.socket is not None:
                self.socket.unlink(missing_ok=True)
