"""One instance of the API as a child process."""

import os
import signal
import subprocess
from functools import partial
from pathlib import Path

from app import feature
from app.embedded.service import CheckError
from app.host import cores, program
from app.host.http import get_status
from app.host.processes import SEARCH_SOCKET, SUPERVISED, die_with_parent, kill_group
from app.host.program import CommandError
from app.resilience import last_valid, worker_table
from app.settings.schema import PREFIX, Settings

_CHECK_SECONDS = 5.0
# By so many checks in a row, one every five seconds: on a busy machine, a beat may be late.
_MAX_MISSED_BEATS = 5
_OK = 200
# The others answer browsers and Frigate, and wait for load balancers at a stop.
_OF_SEARCH = {
    "SEARCH": "alone",
    "SOCKET_MODE": "600",
    "DRAIN_DELAY_SECONDS": "0",
    "PAGE": "false",
    "CORS_ORIGINS": "",
    "FRIGATE_ZMQ": "",
}


class ApiProcess:
    """An instance of the API."""

    ready_seconds = 120.0

    def __init__(self, settings: Settings, socket: Path | None = None, search: Path | None = None) -> None:
        """Prepare an instance at a unix socket, or at host and port; `search` is that of the one that searches, perhaps this."""
        is_search = socket is not None and socket == search
        self._settings = settings
        self.name = "search" if is_search else "the API" if socket is None else f"instance {socket.name}"
        self.socket = socket
        self.url = settings.local_url
        workers = cores.workers(settings.workers, settings.instances)
        self._environment = {f"{PREFIX}SOCKET": str(socket), f"{PREFIX}WORKERS": str(workers)} if socket else {}
        if search is not None:
            self._environment[SEARCH_SOCKET] = str(search)
        if is_search:  # the others answer browsers and Frigate
            self._environment |= {f"{PREFIX}{name}": value for name, value in _OF_SEARCH.items()}
        self._process: subprocess.Popen[bytes] | None = None
        self._answered: subprocess.Popen[bytes] | None = None
        self.is_model_ready = False
        """Whether the default model was ready in a check."""
        self._beats = os.eventfd(0, os.EFD_NONBLOCK)
        self._missed = 0

    def spawn(self) -> None:
        """Start the instance; raise `CommandError` if that is not possible."""
        inherited = [worker_table.create(), last_valid.create(), self._beats, *feature.share(self._settings)]
        try:
            self._process = subprocess.Popen(  # noqa: S603 - our own command line
                program.command("app", "api"),
                env={**program.environment(inherited), "NOTIFY_SOCKET": "", SUPERVISED: str(self._beats), **self._environment},
                pass_fds=inherited,
                process_group=0,  # Ctrl-C must reach only the supervisor
                preexec_fn=partial(_become_api, os.getpid()),  # noqa: PLW1509 - takes no lock
            )
        except (OSError, subprocess.SubprocessError) as error:
            raise CommandError(str(error)) from error

    def poll(self) -> int | None:
        """Return the exit code; None while the instance runs, or before it is started."""
        return None if self._process is None else self._process.poll()

    @property
    def is_running(self) -> bool:
        """Whether the instance was started and has not ended."""
        return self._process is not None and self._process.poll() is None

    def check(self) -> None:
        """Check that the instance responds; once it has, that its main process, which replaces the workers, does."""
        process = self._process
        is_new = process is None or process is not self._answered
        if is_new and not self._answers("/livez"):
            raise CheckError("it does not answer")
        self.is_model_ready = self.is_model_ready or self._answers("/readyz")
        if is_new:
            self._answered, self._missed = process, 0
            return
        try:
            os.eventfd_read(self._beats)
            self._missed = 0
        except BlockingIOError:
            self._missed += 1
            if self._missed >= _MAX_MISSED_BEATS:
                raise CheckError("its main process does not respond", is_final=True) from None

    def _answers(self, path: str) -> bool:
        return get_status(self.url + path, _CHECK_SECONDS, self.socket) == _OK

    def send(self, number: int) -> None:
        """Send the instance a signal, if it runs: SIGTERM or SIGINT ends it with its requests, SIGHUP renews its workers."""
        if self._process is not None:
            self._process.send_signal(number)

    def kill(self) -> None:
        """Kill the instance and its workers."""
        if self._process is not None:
            kill_group(self._process)
            self._process = None
            if self.socket is not None:
                self.socket.unlink(missing_ok=True)


def _become_api(parent: int) -> None:
    # After `stty tostop`, writing the log would stop a process group in the background of a terminal.
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)
    die_with_parent(parent)
