"""The HTTP server: Granian with the gateway's settings, supervision of workers and graceful stop."""

import multiprocessing
import os
import random
import signal
import threading
import time
from asyncio import AbstractEventLoop
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import cache, partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import msgspec
from granian import Granian, _signals
from granian.constants import HTTPModes, Interfaces, Loops
from granian.http import HTTP1Settings
from granian.log import LogLevels
from granian.server.mp import WorkerProcess

from app.embedded.announcement import Announcement
from app.host import cores, ports
from app.host.http import get_status
from app.host.processes import (
    DRAIN_SIGNAL,
    MAX_PASSED_ON,
    REPLACE_SIGNAL,
    SEARCH_SOCKET,
    SUPERVISED,
    connections_within,
    is_beside,
    notify,
    raise_file_limit,
)
from app.host.signals import StopSignals, Terminal
from app.resilience.worker_table import TableView
from app.settings.schema import MIN_AGE_SECONDS, Settings, SettingsError
from app.telemetry.logging import say

_STOP = signal.SIGINT, signal.SIGTERM
_BACKLOG = 4096
# Granian keeps as much for each connection that has sent a large body: 512 clients let a worker grow to 330 MiB with 256 KiB, and
# to 280 with this (`bench overload`). With 128 KiB a body arrives in one part more, which costs CPU time.
_CONNECTION_BYTES = 3 << 16
# Longer than a worker takes to start while Triton responds, so that the old worker runs until the new one is ready.
_HANDOVER_SECONDS = 6.0
# A proxy repeats a request whose idle connection ended with its worker, but not if that happens at every instance.
_PARTING_SECONDS = 1.0
_JITTER = 0.1
_WATCH_SECONDS = 1.0
_MAX_MISSED_BEATS = 10
_READY_SECONDS = 5.0  # longer than Triton may take to answer; also between questions while it cannot run the model: each is logged
_OK = 200
# A worker that ends sooner has failed, and is restarted with increasing delays; one that ends before the shorter one never ran.
_STABLE_SECONDS, _START_SECONDS = 60.0, 5.5
_MAX_PAUSE_SECONDS = 60.0


class Server(Granian):  # type: ignore[misc, valid-type]  # the class depends on the Python version
    """Granian with a graceful stop and replacement of workers whose event loop is blocked or that cannot start."""

    # After the first stop signal, the workers report that they are not ready. After a delay for load balancers, they stop accepting
    # connections, and end when their requests have ended. A second signal kills them.

    def __init__(self, settings: Settings) -> None:
        self._settings = msgspec.structs.replace(settings, instances=0)  # this is one of them
        self._signals, self._terminal = StopSignals(), Terminal()
        self._failures: dict[int, int] = {}
        """How often in a row each worker has ended soon after its start, by index."""
        self._restart_at: dict[int, float] = {}
        """When to start the workers again that have ended too often, by index."""
        self._killed: set[int] = set()
        """Process ids of workers that hung."""
        _signals.set_loop_signals = partial(_stop_once, _signals.set_loop_signals)
        WorkerProcess.is_alive = _is_alive  # type: ignore[method-assign]
        files = raise_file_limit()
        if settings.search == "on" and SEARCH_SOCKET in os.environ:  # some connections need a second one, to search
            files -= min(2 * MAX_PASSED_ON, files // 2)
        super().__init__(
            "app.main:create_app",
            factory=True,
            address=settings.host if settings.socket else ports.resolve(settings.host),
            port=settings.port,
            uds=Path(settings.socket) if settings.socket else None,
            uds_permissions=int(settings.socket_mode, 8),
            workers=1 if is_beside(settings.search) else cores.workers(settings.workers, settings.instances),
            interface=Interfaces.ASGI,
            http=HTTPModes.http1,  # `auto` does not time out a silent connection
            websockets=False,
            loop=Loops.uvloop,
            backlog=_BACKLOG,
            # Limits connections, including idle ones; admission limits requests.
            backpressure=connections_within(files),
            # Granian's limit for receiving a header is also the idle time of a connection.
            http1_settings=HTTP1Settings(header_read_timeout=1000 * settings.keep_alive_seconds, max_buffer_size=_CONNECTION_BYTES),
            respawn_failed_workers=True,
            respawn_interval=_HANDOVER_SECONDS * random.uniform(1, 1 + _JITTER),  # noqa: S311 - not a secret
            # Jitter, so that instances started together do not renew their workers together.
            workers_lifetime=_jittered(settings.worker_max_age_seconds, MIN_AGE_SECONDS) or None,
            workers_max_rss=_jittered(settings.worker_max_memory_mb) or None,
            workers_kill_timeout=settings.drain_seconds,
            log_level=LogLevels.warning,
            process_name=Path(settings.socket).stem or "nereid",
        )

    def startup(self, *arguments: Any) -> None:  # noqa: ANN401 - Granian's own
        """Start the server and the supervision of its workers; raise SettingsError if it cannot listen."""
        with _only_main_thread_takes_signals():
            try:
                super().startup(*arguments)
            except RuntimeError as error:  # its message is a backtrace
                address = self.bind_uds or self._settings.address
                raise SettingsError(f"cannot listen on {address}: {str(error).partition(chr(10))[0]}") from None
            self._table = TableView()
            threading.Thread(target=self._watch_workers, daemon=True).start()
            if SUPERVISED not in os.environ:
                threading.Thread(target=self._announce, daemon=True).start()

    def shutdown(self, *arguments: Any) -> None:  # noqa: ANN401 - Granian's own
        """Stop the workers and the server."""
        started = self._table.beats()
        for worker in self.wrks:
            if worker.inner.pid not in started:  # it has no requests yet, and may be waiting for Triton
                worker.kill()
        self.interrupt_signal = True
        super().shutdown(*arguments)

    def signal_handler_interrupt(self, number: int, _: object = None) -> None:
        """Begin a graceful stop; kill the workers after a second signal."""
        is_first = not self._signals.count
        self._signals.note(number)
        if is_first:
            for worker in self.wrks:
                worker.interrupt_by_parent = True  # expect its end: terminals and systemd signal workers directly as well
            self._announce_stop()
            delay = 0.0 if number == signal.SIGINT else self._settings.drain_delay_seconds  # Ctrl-C: no load balancer to wait for
            threading.Timer(delay, super().signal_handler_interrupt).start()
        elif self._signals.count > 1 and SUPERVISED not in os.environ:
            # Not with a supervisor: it repeats the signal that systemd has already sent to all processes, possibly much later.
            say("ending requests in progress")
            for child in multiprocessing.active_children():
                child.kill()
            if self.bind_uds:
                self.bind_uds.unlink(missing_ok=True)
            os._exit(0)  # in a renewal of a worker as well, which the main thread would finish first

    def signal_handler_reload(self, *arguments: Any) -> None:  # noqa: ANN401 - Granian's own
        """Renew the workers, or stop if the terminal has been closed."""
        if self._terminal.is_closed:
            self.signal_handler_interrupt(signal.SIGTERM)
        else:
            super().signal_handler_reload(*arguments)

    def _respawn_workers(self, workers: list[int], spawn_target: Any, target_loader: Any, delay: float = 0) -> None:  # noqa: ANN401
        # Granian's own ends a worker whose successor cannot start, and ends itself when one worker dies twice in seconds.
        for index in workers:
            old = self.wrks[index]
            if self._signals.count or (not delay and not self._may_restart(old)):  # renewing a worker takes seconds
                continue
            self._restart_at.pop(index, None)
            if delay:
                say(f"renewing worker-{index + 1}")
            with _only_main_thread_takes_signals():
                new = self._spawn_worker(index, spawn_target, target_loader)
                new.start()
                self.wrks[index] = new
            time.sleep(delay)
            if old.is_alive() and not new.is_alive():
                say(f"worker-{index + 1} stays, because its successor cannot start")
                self.wrks[index] = old
                continue
            if delay:
                _notify(old, REPLACE_SIGNAL)
                time.sleep(_PARTING_SECONDS)
            old.terminate()
            old.join(self.workers_kill_timeout)
            if old.is_alive():
                old.kill()
                old.join()

    def _may_restart(self, ended: Any) -> bool:  # noqa: ANN401 - Granian's own
        if ended.is_alive():  # only its successor has ended
            return False
        index, now = ended.idx, time.monotonic()
        if ended.inner.exitcode == -signal.SIGKILL and index not in self._restart_at and ended.inner.pid not in self._killed:
            say(f"worker-{index + 1} was killed with signal 9: somebody did, or the kernel, because memory ran out")
        if index in self._restart_at:
            return now >= self._restart_at[index]
        age: float = now - ended.birth
        failures = self._failures[index] = self._failures.get(index, 0) + 1 if age < _STABLE_SECONDS else 0
        if failures <= 1:
            return True
        serving = self._table.beats()
        if any(other.is_alive() and (other.inner.pid in serving or not self._failures.get(other.idx)) for other in self.wrks):
            pause = min(2.0 ** (failures - 2), _MAX_PAUSE_SECONDS)
            say(f"worker-{index + 1} ended soon after its start, {failures} times in a row; the next start is in {pause:g} s")
            self._restart_at[index] = now + pause
            return False
        if age < _START_SECONDS:
            say(f"worker-{index + 1} cannot start, and no other serves")
            self.shutdown(1)
        return True

    def _announce_stop(self) -> None:
        for worker in list(self.wrks):
            _notify(worker, DRAIN_SIGNAL)

    def _announce(self) -> None:
        announcement = Announcement(self._settings, "it")
        status = None
        while not announcement.is_ready and not self._signals.count:
            time.sleep(_WATCH_SECONDS if status is None else _READY_SECONDS)
            status = get_status(f"{self._settings.local_url}/readyz", _READY_SECONDS, self.bind_uds)
            if status is not None and not self._signals.count:  # while it stops, it is not ready
                announcement.update(is_ready=status == _OK)

    def _watch_workers(self) -> None:
        # It counts checks, not seconds, so a suspended machine causes no false alarm. `serve` or systemd watches this process.
        seen: dict[int, tuple[int, int]] = {}
        """By process id: the last count of beats, and the number of checks in which it was unchanged."""
        is_ready = False
        while True:
            time.sleep(_WATCH_SECONDS)
            notify("WATCHDOG=1")
            if SUPERVISED in os.environ:
                os.eventfd_write(int(os.environ[SUPERVISED]), 1)
            if self.interrupt_signal:
                # Between the start of its application and its first request, a worker's event loop is briefly not running. uvloop
                # delays a signal that arrives then until the next signal.
                self._announce_stop()
            elif not self._signals.count:
                self.interrupt_children += [index for index, at in list(self._restart_at.items()) if time.monotonic() >= at]
            if self.interrupt_children:  # also one that ended while others were renewed, which Granian forgets
                self.main_loop_interrupt.set()
            own = {worker.inner.pid for worker in list(self.wrks)}
            beats = {pid: count for pid, count in self._table.beats().items() if pid in own}
            if beats and not is_ready:
                is_ready = True
                notify("READY=1")
            seen = {pid: (count, seen[pid][1] + 1 if seen.get(pid, (-1, 0))[0] == count else 0) for pid, count in beats.items()}
            for pid, (_, times) in seen.items():
                if times >= _MAX_MISSED_BEATS and not self._signals.count:
                    say(f"worker {pid} does not respond; replacing it")
                    self._killed.add(pid)
                    with suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)


def _stop_once(set_loop_signals: Callable[[AbstractEventLoop], Any], loop: AbstractEventLoop) -> Any:  # noqa: ANN401 - Granian's own
    # Terminals and systemd signal each worker in addition to Granian, whose handler puts each signal in a queue with room for one,
    # which is read once the worker serves; the next call blocks.
    event = set_loop_signals(loop)
    stop = cache(event.set)
    for number in _STOP:
        loop.add_signal_handler(number, stop)
    return event


@contextmanager
def _only_main_thread_takes_signals() -> Iterator[None]:
    # A signal that another thread took, as may happen after SIGCONT, would not wake the main thread. Workers that are started have
    # to reset the mask, which they inherit as well.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*_STOP, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _is_alive(worker: Any) -> bool:  # noqa: ANN401 - Granian's own
    # `multiprocessing` reports a worker as alive while another thread reaps it, as a thread of Granian does. Granian would then
    # report that the worker refuses to stop, and signal its former process id.
    return not wait([worker.inner.sentinel], 0)


def _notify(worker: Any, notice: signal.Signals) -> None:  # noqa: ANN401 - Granian's own
    with suppress(ProcessLookupError):  # the worker has just ended
        if worker.is_alive():  # otherwise another process may have its id
            os.kill(worker.inner.pid, notice)


def _jittered(value: int, least: int = 1) -> int:
    return value and max(least, round(value * random.uniform(1 - _JITTER, 1 + _JITTER)))  # noqa: S311 - not a secret
