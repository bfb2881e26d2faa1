"""Checks before the API starts. Each failure is reported in one line."""

import errno
import os
import subprocess
from pathlib import Path

from app.doctor import consistency, machine
from app.doctor.finding import Severity
from app.embedded.folder import TritonFolder
from app.embedded.postgres.server import EmbeddedPostgres
from app.host import ports, program
from app.host.processes import SUPERVISED
from app.settings.schema import PREFIX, Settings, SettingsError
from app.telemetry.logging import say


def require_startable(settings: Settings) -> None:
    """Check all that this module checks, and make the folder of the instances' sockets; raise SettingsError or CommandError."""
    require_usable(settings)
    if settings.instances:
        make_socket_folder(settings.socket_folder)
    else:
        require_address(settings)


def require_usable(settings: Settings) -> None:
    """Check the files and packages that every worker needs; raise SettingsError or CommandError."""
    # Whoever detects must not wait for a dead disk.
    folders = consistency.check_search_folders(settings) if settings.search == "alone" else ()
    for finding in (*consistency.check_files(settings), *folders):
        if finding.severity is Severity.FAILURE:
            raise SettingsError(f"{finding.message}; {finding.fix}")
    if (pillow := machine.check_pillow()).severity is Severity.WARNING and SUPERVISED not in os.environ:
        say(f"warning: {pillow.message}")
    if not settings.triton_endpoints:
        TritonFolder(settings).make()
    if settings.search != "off" and not settings.database_url:
        EmbeddedPostgres(settings).folder.make()
    if settings.tracing and SUPERVISED not in os.environ:
        _require_tracing()


def _require_tracing() -> None:
    # In a separate process, because it starts threads, which must not exist when workers are forked.
    command = program.command("app.telemetry.tracing")
    tried = subprocess.run(command, env=program.environment(), capture_output=True, text=True, check=False)  # noqa: S603
    if tried.returncode:
        reason = tried.stderr.strip().rpartition("\n")[2]
        raise SettingsError(f"{PREFIX}TRACING: OpenTelemetry does not accept its own settings, OTEL_*: {reason}")


def require_address(settings: Settings) -> None:
    """Raise SettingsError unless the API can listen on its socket, or its host and port; remove a stale socket."""
    path = Path(settings.socket).resolve() if settings.socket else None
    try:
        is_free = ports.remove_stale_socket(path) if path else ports.is_free(settings.host, settings.port)
    except (OSError, UnicodeError) as error:
        address = path or settings.address
        raise SettingsError(f"cannot listen on {address}: {getattr(error, 'strerror', None) or error}") from error
    if is_free:
        return
    if path:
        raise SettingsError(f"socket {path} is in use, or its folder does not exist; choose another with {PREFIX}SOCKET")
    found = ports.holder(settings.port)
    by = f" by process {found[0]} ({found[1]})" if found else ""
    raise SettingsError(f"port {settings.port} is in use{by}; end it, or choose another with --port")


def make_socket_folder(folder: Path) -> None:
    """Create the folder for the sockets of several instances; raise SettingsError if they cannot be there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise SettingsError(f"cannot create {folder} for the instances' sockets: {error.strerror}") from error
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SettingsError(f"cannot create the instances' sockets in {folder}: {os.strerror(errno.EACCES)}")
