"""Large images that wait for their decoding: how long they will keep the decoding threads of the host busy."""

import math

from app.errors import GatewayFull
from app.resilience.deadline import Deadline
from app.resilience.lease import Lease
from app.resilience.worker_table import WorkerTable

# Smaller images are decoded in milliseconds: what they take is part of the usual duration of a request.
_MIN_PIXELS = 1_000_000
_INITIAL_SECONDS_PER_PIXEL = 12e-9
# Formats differ by less; a few images that are crafted to be slow, or that are almost empty, must not decide for all.
_FASTEST, _SLOWEST = 4e-9, 48e-9
_SMOOTHING = 0.1  # weight of the newest image in the average
# The model needs some of a request's time, too, and other work may keep the CPUs busy.
_SHARE = 0.5


class DecodeBacklog:
    """Pixels that are to be decoded, in all workers of a host, and how many a thread decodes in a second.

    Admission counts requests, whose usual duration it knows. A burst of images that are much larger than the usual ones would
    take longer than their deadline allows.
    """

    def __init__(self, table: WorkerTable, threads: int) -> None:
        """Count in a table; so many threads of the host decode at a time."""
        self._table = table
        self._column = table.column("decode backlog")
        self._threads = threads
        self._seconds_per_pixel = _INITIAL_SECONDS_PER_PIXEL

    @property
    def pixels(self) -> int:
        """Pixels that are to be decoded."""
        return self._table.total(self._column)

    def add(self, pixels: int, deadline: Deadline) -> Lease:
        """Count an image until the lease is released, in the event loop.

        Raises:
            GatewayFull: The images before it, and it, would take more than half of the time that is left.
        """
        lease = Lease()
        if pixels < _MIN_PIXELS:
            return lease
        self._table.add(self._column, pixels)  # first, so that two workers see each other
        total = self.pixels
        seconds = total * self._seconds_per_pixel / self._threads
        if total > pixels and seconds > _SHARE * deadline.remaining:
            self._table.add(self._column, -pixels)
            raise GatewayFull("decoding the image, and those before it, would take too long", "decoding", math.ceil(seconds))
        lease.on_release(lambda: self._table.add(self._column, -pixels))
        return lease

    def measure(self, pixels: int, cpu_seconds: float) -> None:
        """Take note of the CPU time that decoding an image took. From any thread."""
        if pixels >= _MIN_PIXELS:
            found = min(max(cpu_seconds / pixels, _FASTEST), _SLOWEST)
            self._seconds_per_pixel += (found - self._seconds_per_pixel) * _SMOOTHING
