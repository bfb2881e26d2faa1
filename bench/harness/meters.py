"""CPU time and memory of processes, from /proc."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from threading import Event, Thread
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import psutil

from bench.harness.counters import Counters, CountersError, read_counters
from bench.load.outcome import Outcome
from bench.report.measurements import Measurement, WorkerMemory

MIB = 2**20
SAMPLES_PER_SECOND = 5
"""How often memory is read."""

Processes = Mapping[str, list[psutil.Process]]
"""Processes on this machine by kind: `gateway`, `triton` and `stubs`."""


class Meters:
    """Measures CPU time and Triton's statistics since its creation."""

    def __init__(self, find: Callable[[], Processes], triton: str, model: str) -> None:
        """Start measuring.

        Args:
            find: Finds the processes; called again at the end.
            triton: Its gRPC endpoint; empty for none.
            model: Model whose statistics to read; empty for none.
        """
        self._find = find
        self._triton = triton
        self._model = model
        self._before = _cpu_by_process(find())
        self._counters, self._note = self._read_counters()

    def read(self, outcome: Outcome) -> Measurement:
        """Return the measurement of a load that began after the creation and has just ended."""
        seconds = {
            kind: sum(spent - self._before.get(kind, {}).get(pid, 0.0) for pid, spent in processes.items())
            for kind, processes in _cpu_by_process(self._find()).items()
        }
        seconds["client"] = outcome.driver_cpu * outcome.seconds
        cpu_ms = {kind: spent * 1e3 / outcome.requests for kind, spent in seconds.items() if outcome.requests}
        counters, note = self._read_counters()
        if not (counters and self._counters):
            return Measurement(outcome=outcome, cpu_ms=cpu_ms, triton_note=self._note or note)
        return Measurement(outcome=outcome, cpu_ms=cpu_ms, triton=counters.since(self._counters))

    def _read_counters(self) -> tuple[Counters | None, str]:
        """Read Triton's statistics; if that fails, return None and the reason."""
        if not (self._triton and self._model):
            return None, ""
        try:
            return read_counters(self._triton, self._model), ""
        except CountersError as error:
            return None, str(error)


@contextmanager
def sampled_memory(processes: Sequence[psutil.Process]) -> Iterator[list[WorkerMemory]]:
    """Sample the memory of processes in a thread until the block ends: one series per process, up to the end of the process."""
    series = [WorkerMemory([], []) for _ in processes]
    started, is_over = perf_counter(), Event()

    def sample() -> None:
        while True:
            began = perf_counter()
            for process, one in zip(processes, series, strict=True):
                with suppress(psutil.Error):
                    memory = process.memory_info()
                    one.seconds.append(round(perf_counter() - started, 2))
                    one.resident_mib.append(round(memory.rss / MIB, 1))
            if is_over.wait(began + 1 / SAMPLES_PER_SECOND - perf_counter()):
                return

    thread = Thread(target=sample)
    thread.start()
    try:
        yield series
    finally:
        is_over.set()
        thread.join()


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return a process and its descendants; empty if it has ended."""
    with suppress(psutil.NoSuchProcess):
        return [process, *process.children(recursive=True)]
    return []


def children(process: psutil.Process) -> list[psutil.Process]:
    """Return the descendants of a process."""
    return family(process)[1:]


def listeners(address: str) -> list[psutil.Process]:
    """Find the processes of this machine that listen at an address: a URL, or a gRPC endpoint, `host:port` or `unix:/path`."""
    parts = urlsplit(address if "://" in address or address.startswith("unix:") else f"//{address}")

    def is_here(connection: Any) -> bool:  # noqa: ANN401 - psutil's own
        if parts.scheme == "unix":
            return bool(connection.laddr == parts.path)
        return bool(connection.status == psutil.CONN_LISTEN and connection.laddr.port == (parts.port or 80))

    found = []
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if any(map(is_here, process.net_connections("unix" if parts.scheme == "unix" else "tcp"))):
                found.append(process)
    return found


def cpu_seconds(process: psutil.Process) -> float:
    """Return the CPU time of a process; 0 if it has ended."""
    with suppress(psutil.Error):
        times = process.cpu_times()
        return float(times.user + times.system)
    return 0.0


def find_workers(process: psutil.Process, count: int) -> list[psutil.Process]:
    """Return a server's workers: the largest of its processes."""
    sizes = []
    for member in family(process):
        with suppress(psutil.Error):
            sizes.append((member.memory_info().rss, member.pid, member))
    return [member for _, _, member in sorted(sizes, reverse=True)[:count]]


def memory_mib(processes: Sequence[psutil.Process]) -> float:
    """Return the memory of processes, in MiB; what several of them share counts once, those that have ended do not."""
    total = 0
    for process in processes:
        with suppress(psutil.Error):
            total += process.memory_full_info().pss
    return total / MIB


def _cpu_by_process(processes: Processes) -> dict[str, dict[int, float]]:
    return {kind: {process.pid: cpu_seconds(process) for process in found} for kind, found in processes.items() if found}
