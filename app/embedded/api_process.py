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
    """An instance of the API, running or not."""

    ready_seconds = _READY_SECONDS
    is_always_checked = False  # it watches its workers itself

    def __init__(self, settings: Settings, socket: Path | None = None) -> None:
        """Prepare an instance that listens on a unix socket, or else on host and port."""
        self.name = "the API" if socket is None else f"instance {socket.name}"
        self.socket = socket
        self.url = settings.local_url
        workers = cores.workers(settings.workers, settings.instances)
        self._environment = {f"{PREFIX}SOCKET": str(socket), f"{PREFIX}WORKERS": str(workers)} if socket else {}
        self._process: subprocess.Popen[bytes] | None = None

    def spawn(self) -> None:
        """Start it.

        Raises:
            StartError: There is no memory for it, or no process.
        """
        inherited = [worker_table.create(), last_valid.create()]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line
                program.command("app", "api"),
                env={**program.environment(), SUPERVISED: "1", **self._environment},
                pass_fds=inherited,
                start_new_session=True,  # a Ctrl-C reaches only us
                preexec_fn=partial(die_with_parent, os.getpid()),  # noqa: PLW1509 - it takes no lock
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise StartError(str(error)) from error

    def poll(self) -> int | None:
        """Return its exit code; None while it runs, or before it was started."""
        return None if self._process is None else self._process.poll()

    @property
    def is_running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Find out whether it answers.

        Raises:
            CheckError: It does not.
        """
        status = get_status(f"{self.url}/livez", _CHECK_SECONDS, self.socket)
        if status != _OK:
            raise CheckError("it does not answer")

    def drain(self, number: int) -> None:
        """Let it end once its requests have ended; it is told of the signal that ends the whole service."""
        if self._process is not None:
            self._process.send_signal(number)

    def renew_workers(self) -> None:
        """Let it replace its workers, one after the other."""
        if self.is_running and self._process is not None:
            self._process.send_signal(signal.SIGHUP)

    def kill(self) -> None:
        """End it, and its workers, at once."""
        if self._process is not None:
            kill_group(self._process)
            self._process = None
            if self.socket is not None:
                self.socket.unlink(missing_ok=True)
