"""Sampling of the memory of processes in the background."""

from collections.abc import Sequence
from contextlib import suppress
from threading import Event, Thread
from time import perf_counter
from typing import Self

import psutil

from bench.harness.meters import MIB
from bench.report.measurements import WorkerMemory

SAMPLES_PER_SECOND = 5


class MemorySampler:
    """Samples the memory of processes in a thread until it is closed."""

    def __init__(self, processes: Sequence[psutil.Process]) -> None:
        self.series = [WorkerMemory([], [], []) for _ in processes]
        """One series per process, up to the end of the process."""
        self._processes = processes
        self._started = perf_counter()
        self._is_over = Event()
        self._thread = Thread(target=self._run)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            began = perf_counter()
            for process, series in zip(self._processes, self.series, strict=True):
                with suppress(psutil.Error):
                    memory = process.memory_full_info()
                    series.seconds.append(round(perf_counter() - self._started, 2))
                    series.resident_mib.append(round(memory.rss / MIB, 1))
                    series.proportional_mib.append(round(memory.pss / MIB, 1))
            if self._is_over.wait(began + 1 / SAMPLES_PER_SECOND - perf_counter()):
                return
