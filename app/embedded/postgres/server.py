"""The process of the embedded PostgreSQL, which listens on a unix socket that only its user, and root, can reach."""

import fcntl
import os
import pwd
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from app.embedded.folder import PrivateFolder
from app.embedded.log_file import LogFile
from app.embedded.postgres.install import install, programs
from app.embedded.service import CheckError
from app.host import cores, memory
from app.host.processes import die_with_parent, kill_group
from app.host.program import CommandError
from app.settings.schema import PREFIX, Settings
from app.telemetry.logging import say

USER = "nereid"
"""The superuser, and the name of the database."""
_PORT = "5432"  # part of the socket's name
# Recovery after a crash may take minutes.
_READY_SECONDS = 600.0
_CHECK_SECONDS = 10
_STOP_SECONDS = 20.0
_POLL_SECONDS = 0.05
_MIB = 2**20


class EmbeddedPostgres:
    """An embedded PostgreSQL."""

    name = "PostgreSQL"
    ready_seconds = _READY_SECONDS
    version = "18"
    installed = "pginstall18"
    """The folder of the wheel."""
    locale: tuple[str, ...] = ("--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--locale=C")
    """Options of `initdb`."""

    def __init__(self, settings: Settings, **options: str) -> None:
        """Prepare the server without starting it; `options` are further settings of PostgreSQL."""
        self._home = Path(settings.database_home).resolve()
        self._data = self._home / "data"
        self._programs = programs(self._home, self.installed)
        self._options = options
        self._connections = max(100, 20 + 2 * cores.workers_of_host(settings.workers, settings.instances))  # at least 2 each
        self._user = _unprivileged_user() if not os.geteuid() else None
        owner = self._user.pw_uid if self._user else None
        self.folder = PrivateFolder(settings.database_folder, settings.database_home, self.name, owner)
        self._data_lock = -1
        self._log = LogFile(self._home / "postgres.log")
        self.log = self._log.path
        self._process: subprocess.Popen[bytes] | None = None

    def prepare(self) -> None:
        """Reserve the folder of the socket until `stop`; then install the programs and make the database, or raise CommandError."""
        with self.folder.unclaimed_on_error():
            self.folder.claim()  # before the installation, which may take a while
            install(self._home, self.installed)
            self._make_database()

    def start(self) -> None:
        """Prepare and start the server, and wait until it answers; raise `CommandError` as `prepare` does, or if it ends."""
        try:
            self.prepare()
            self.spawn()
            self._wait()
        except BaseException:
            self.stop()
            raise

    def spawn(self) -> None:
        """Start the server without waiting for it; raise `CommandError` if it is not installed, or as `prepare` does."""
        try:
            with self.folder.unclaimed_on_error():
                self.folder.claim(attempts=1)
                self._make_database()
                with self._locking_data():
                    self._run_server()
        except OSError as error:
            raise CommandError(f"PostgreSQL cannot be run here: {error}") from error

    def check(self) -> None:
        """Check that the server accepts connections."""
        if not self.folder.is_held():
            raise CheckError(f"its folder {self.folder.path} was removed")
        command = ["pg_isready", "--quiet", f"--host={self.folder.path}", f"--port={_PORT}", f"--timeout={_CHECK_SECONDS}"]
        try:
            self._run(command)
        except CommandError as error:
            raise CheckError("it does not accept connections, or not yet") from error

    def poll(self) -> int | None:
        """Return the exit code; None while the server runs. Call this regularly: it also keeps the log short."""
        self._log.shorten()
        return None if self._process is None else self._process.poll()

    def kill(self) -> None:
        """Kill the server, and the processes that a killed server leaves, which may work on for a while."""
        if self._process is not None:
            kill_group(self._process)
            for pid in self._own_processes():
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._process = None

    def stop(self) -> None:
        """Stop the server, by force if necessary, and leave its folders to other processes."""
        if self._process is not None:
            self._process.send_signal(signal.SIGINT)  # does not wait for clients
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(_STOP_SECONDS)
            self.kill()
        self.folder.give_up()
        self._unlock_data()

    def _make_database(self) -> None:
        try:
            if self._data.exists():
                version = (self._data / "PG_VERSION").read_text(encoding="ascii").strip()
                if version != self.version:
                    raise CommandError(f"{self._data} is of PostgreSQL {version}, and this is {self.version}: restore a backup")
                return
            for leftover in self._home.glob("new.*"):  # of a killed process
                shutil.rmtree(leftover, ignore_errors=True)
            with TemporaryDirectory(dir=self._home, prefix="new.") as folder:
                if self._user:
                    os.chown(folder, self._user.pw_uid, self._user.pw_gid)
                made = f"{folder}/data"
                given = ("--username", USER, "--auth=trust", "--encoding=UTF8", *self.locale, "--data-checksums")
                self._run(["initdb", "-D", made, *given])
                self._run(["postgres", "--single", "-D", made, "postgres"], f"CREATE DATABASE {USER}\n")
                Path(made).rename(self._data)
        except OSError as error:
            raise CommandError(f"{self._data} could not be made or read: {error.strerror}") from error

    @contextmanager
    def _locking_data(self) -> Iterator[None]:
        # Processes in another container do not see the folder of the socket.
        if self._data_lock < 0:
            self._data_lock = os.open(self._data, os.O_RDONLY | os.O_DIRECTORY)
        try:
            try:
                fcntl.flock(self._data_lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise CommandError(f"another process, perhaps in another container, uses {self._data}") from error
            yield
        except BaseException:
            self._unlock_data()
            raise

    def _unlock_data(self) -> None:
        with suppress(OSError):
            os.close(self._data_lock)
        self._data_lock = -1

    def _run_server(self) -> None:
        self.folder.clear()
        if not any(self._own_processes()):  # the process id in it may be that of another program now
            (self._data / "postmaster.pid").unlink(missing_ok=True)
        options = self._settings() | self._options
        with self._log.open() as log:
            self._process = self._popen(
                ["postgres", "-D", str(self._data), *(f"--{name}={value}" for name, value in options.items())],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[self.folder.descriptor, self._data_lock],  # lock both folders until its last process has ended
                process_group=0,  # Ctrl-C must reach only the supervisor
                preexec_fn=partial(_become_postgres, os.getpid()),
            )

    def _wait(self) -> None:
        while True:
            with suppress(CheckError):
                self.check()
                return
            if self.poll() is not None:
                raise CommandError(f"PostgreSQL did not start; its log is {self.log}")
            time.sleep(_POLL_SECONDS)

    def _own_processes(self) -> Iterator[int]:
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # another user's, or ended meanwhile
                if (process / "cwd").samefile(self._data) and (process / "exe").samefile(self._programs / "postgres"):
                    yield int(process.name)

    def _settings(self) -> dict[str, str]:
        available, shared = memory.available_bytes(), os.statvfs("/dev/shm")  # noqa: S108 - where it builds indexes in parallel
        building = min(available // 16, shared.f_bavail * shared.f_frsize // 4, 2048 * _MIB)
        return {
            "listen_addresses": "",
            "unix_socket_directories": str(self.folder.path),
            "port": _PORT,
            "max_connections": str(self._connections),
            "shared_buffers": f"{max(min(available // 8, 8192 * _MIB), 32 * _MIB) // _MIB}MB",
            "effective_cache_size": f"{available // 2 // _MIB}MB",
            "maintenance_work_mem": f"{max(building, 16 * _MIB) // _MIB}MB",
            "max_wal_size": "2GB",
            "jit": "off",  # compiling takes longer than the queries
            "timezone": "UTC",
            "log_timezone": "UTC",
        }

    def _run(self, command: list[str], text: str = "") -> None:
        with self._popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
            output, _ = process.communicate(text.encode())
        if process.returncode:
            raise CommandError(f"{command[0]} of PostgreSQL failed: {output.decode(errors='replace').strip()[-500:]}")

    def _popen(self, command: list[str], **given: Any) -> "subprocess.Popen[bytes]":  # noqa: ANN401
        if self._user:
            given |= {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}
        try:
            return subprocess.Popen([self._programs / command[0], *command[1:]], env=environment(), cwd="/", **given)  # noqa: S603
        except FileNotFoundError as error:
            raise CommandError(f"it is not installed in {self._home}") from error
        except PermissionError as error:
            name, setting = self._user.pw_name if self._user else "this user", f"{PREFIX}DATABASE_HOME"
            text = f"the user {name}, who would run PostgreSQL, cannot enter a folder above {self._home}"
            raise CommandError(f"{text}: let others enter it, or choose another folder with {setting}") from error
        except (OSError, subprocess.SubprocessError) as error:
            raise CommandError(f"PostgreSQL cannot be run here: {error}") from error


def embedded_database(settings: Settings, stack: ExitStack, *, is_required: bool) -> EmbeddedPostgres | None:
    """Prepare the embedded PostgreSQL until the end of the stack, if there is one; raise CommandError only if it is required."""
    if settings.search == "off" or settings.database_url:
        return None
    database = None
    try:
        database = EmbeddedPostgres(settings)
        stack.callback(database.stop)
        database.prepare()
    except CommandError as error:
        if is_required:
            raise
        say(f"warning: PostgreSQL could not be started, and will be tried again: {error}")
    else:
        say(f"PostgreSQL has its data in {settings.database_home}; its log is {database.log}")
    return database


def environment() -> dict[str, str]:
    """Return the environment of PostgreSQL's programs, without variables that tell them of another server."""
    return {name: value for name, value in os.environ.items() if not name.startswith("PG")}


def _unprivileged_user() -> pwd.struct_passwd:
    # PostgreSQL refuses root.
    for name in ("postgres", "nobody"):
        with suppress(KeyError):
            return pwd.getpwnam(name)
    raise CommandError("PostgreSQL refuses to be run by root, and there is no user postgres or nobody")


def _become_postgres(parent: int) -> None:
    os.umask(0o077)
    die_with_parent(parent, signal.SIGINT)
