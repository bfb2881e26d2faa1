"""Run the instances of the API and the embedded programs: restart programs that end, and stop everything in order."""

import fcntl
import os
import shutil
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from app.embedded.announcement import Announcement
from app.embedded.api_process import ApiProcess
from app.embedded.service import Program, Service, ServiceError
from app.host.processes import notify
from app.host.program import CommandError
from app.host.signals import StopSignals, Terminal
from app.resilience import worker_table
from app.resilience.worker_table import COUNTER, SEPARATOR, TableView
from app.settings.schema import Settings
from app.telemetry.logging import say
from app.telemetry.metrics import MODEL_DEATHS, WRONG_ANSWERS
from app.triton import shared_memory

_POLL_SECONDS = 0.1
_DEFECTS = {MODEL_DEATHS: "a process of {model} has died", WRONG_ANSWERS: "the answers of {model} are wrong"}
# Time for an instance to exit after its workers have been drained or killed.
_MARGIN_SECONDS = 5.0
_SEARCH_FOLDER = "nereid-search-"


def supervise(settings: Settings, triton: Program | None, database: Program | None = None) -> int:
    """Run the API, search and Triton, which has been started, until a signal or a permanent failure; return the exit code."""
    # Whatever becomes of search and its database, the API goes on.
    with _search_folder() if settings.search == "on" else nullcontext() as folder:
        return _supervise(settings, triton, database, folder and folder / "search.sock")


def _supervise(settings: Settings, triton: Program | None, database: Program | None, socket: Path | None) -> int:
    signals = StopSignals()
    for stop in (signal.SIGTERM, signal.SIGINT):
        signal.signal(stop, lambda number, _: signals.note(number))
    worker_table.create()
    table = TableView()
    instances = [ApiProcess(settings, each, socket) for each in settings.sockets]
    services = [Service(instance) for instance in instances]
    embedded = [Service(triton, is_ready=True)] if triton is not None else []
    searching = [] if socket is None else [ApiProcess(settings, socket, socket)]
    others = [Service(program, gives_up=False) for program in (database, *searching) if program is not None]
    watched = [*services, *embedded, *others]
    terminal = Terminal()

    def hang_up(*_: object) -> None:
        if terminal.is_closed:
            signals.note(signal.SIGTERM)
            return
        for service in watched:
            if service.is_ready and isinstance(service.program, ApiProcess):  # before that, the signal would kill it
                service.program.send(signal.SIGHUP)

    signal.signal(signal.SIGHUP, hang_up)
    try:
        _look_after(watched, services, embedded, instances, signals, table, Announcement(settings, "everything"))
        say("stopping when requests in progress have ended; a second signal ends them")
        code = 0
    except ServiceError as error:
        say(str(error))
        code = error.code
    finally:
        for service in watched:
            service.close()
        table.close()
        until = time.monotonic() + settings.drain_delay_seconds + settings.drain_seconds + _MARGIN_SECONDS
        _drain(instances, signals, until)
        _drain(searching, signals, until)  # the others have asked it until now
        ignore_signals()
        for instance in [*instances, *searching]:
            instance.kill()
        if triton is not None:  # with an external Triton, the next worker does this
            shared_memory.sweep()
    return code


@contextmanager
def _search_folder() -> Iterator[Path]:
    for left in shared_memory.SHM.glob(f"{_SEARCH_FOLDER}*/lock"):
        with suppress(OSError), _opening(left, os.O_RDONLY):  # a living process has locked it, or it is another user's
            shutil.rmtree(left.parent)
    try:
        made = TemporaryDirectory(prefix=_SEARCH_FOLDER, dir=shared_memory.SHM, ignore_cleanup_errors=True)
    except OSError as error:
        raise CommandError(f"cannot make a folder in {shared_memory.SHM} for the socket of search: {error.strerror}") from error
    with made as name:
        folder = Path(name)
        with _opening(folder / "new", os.O_CREAT | os.O_RDWR):
            (folder / "new").rename(folder / "lock")  # others find it only now that it is locked
            yield folder


@contextmanager
def _opening(lock: Path, flags: int) -> Iterator[None]:
    descriptor = os.open(lock, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)  # another user may have put a pipe there
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)


def ignore_signals() -> None:
    """Ignore further signals, so that they do not interrupt the clean-up."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)


def _look_after(  # noqa: PLR0913, PLR0917 - all that is looked after
    watched: list[Service],
    services: list[Service],
    tritons: list[Service],
    instances: list[ApiProcess],
    signals: StopSignals,
    table: TableView,
    announcement: Announcement,
) -> None:
    defects: dict[tuple[str, str], int] = {}
    while not signals.count:
        notify("WATCHDOG=1")
        for service in watched:
            service.tick()
        if all(service.is_ready for service in services):
            if announcement.is_ready is None:
                notify("READY=1")
            announcement.update(is_ready=all(instance.is_model_ready for instance in instances))
        # Triton does not notice that a process has died in which it runs a model, or that its answers are wrong. The workers do,
        # and count it.
        known, defects = defects, _count_defects(table)
        for metric, model in (defect for defect, count in defects.items() if count > known.get(defect, 0)):
            for service in tritons:
                service.note_defect(_DEFECTS[metric].format(model=model))
        time.sleep(_POLL_SECONDS)


def _count_defects(table: TableView) -> dict[tuple[str, str], int]:
    keys = {key: key.split(SEPARATOR) for key in table.keys(COUNTER)}
    return {
        (names[0], names[1]): table.total_ever(table.column(COUNTER + key)) for key, names in keys.items() if names[0] in _DEFECTS
    }


def _drain(instances: list[ApiProcess], signals: StopSignals, until: float) -> None:
    for instance in instances:
        instance.send(signals.first or signal.SIGTERM)
    while any(instance.is_running for instance in instances) and time.monotonic() < until:
        notify("WATCHDOG=1")
        if signals.count > 1:
            say("ending requests in progress")
            break
        time.sleep(_POLL_SECONDS)
