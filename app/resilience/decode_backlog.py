"""Large images that wait for their decoding: how long they will keep the CPUs of the host busy."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from time import thread_time

from app.errors import GatewayFull
from app.resilience.deadline import Deadline
from app.resilience.worker_table import WorkerTable

# Smaller images are decoded in milliseconds: what they take is part of the usual duration of a request.
_MIN_PIXELS = 1_000_000
_INITIAL_SECONDS_PER_PIXEL = 12e-9
_SMOOTHING = 0.1  # weight of the newest image in the average
# The model needs some of a request's time, too, and the CPUs may be busy with other work.
_SHARE = 0.5


class DecodeBacklog:
    """Pixels that are to be decoded, in all workers of a host, and how many a CPU decodes in a second.

    Admission counts requests, whose usual duration it knows. A burst of images that are much larger than the usual ones would
    take longer than their deadline allows.
    """

    def __init__(self, table: WorkerTable, cpus: int) -> None:
        self._table = table
        self._column = table.column("decode backlog")
        self._cpus = cpus
        self._seconds_per_pixel = _INITIAL_SECONDS_PER_PIXEL

    @property
    def pixels(self) -> int:
        """Pixels that are to be decoded."""
        return self._table.total(self._column)

    @contextmanager
    def count(self, pixels: int, deadline: Deadline) -> Iterator[None]:
        """Count an image within a `with` block, in the event loop.

        Raises:
            GatewayFull: The images before it, and it, would take more than half of the time that is left.
        """
        if pixels < _MIN_PIXELS:
            yield
            return
        before = self.pixels
        seconds = (before + pixels) * self._seconds_per_pixel / self._cpus
        if before and seconds > _SHARE * deadline.remaining:
            raise GatewayFull("the images that are to be decoded before would take too long", math.ceil(seconds))
        self._table.add(self._column, pixels)
        try:
            yield
        finally:
            self._table.add(self._column, -pixels)

    @contextmanager
    def measure(self, pixels: int) -> Iterator[None]:
        """Measure the CPU time of a `with` block, in the thread that decodes an image."""
        if pixels < _MIN_PIXELS:
            yield
            return
        start = thread_time()
        yield
        self._seconds_per_pixel += ((thread_time() - start) / pixels - self._seconds_per_pixel) * _SMOOTHING
