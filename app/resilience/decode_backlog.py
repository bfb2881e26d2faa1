"""Backlog of large images to decode: estimates how long it keeps the decoding threads of the host busy."""

import math

from app.errors import GatewayFull
from app.resilience.deadline import Deadline
from app.resilience.lease import Lease
from app.resilience.worker_table import WorkerTable

# Smaller images are decoded in milliseconds, which is part of the usual duration of a request.
_MIN_PIXELS = 1_000_000
_INITIAL_SECONDS_PER_PIXEL = 12e-9
# Bounds of a measurement, wider than the differences between formats: crafted or nearly empty images must not dominate.
_FASTEST, _SLOWEST = 4e-9, 48e-9
_SMOOTHING = 0.1  # weight of the newest image in the average
# Fraction of the remaining time for decoding. The model needs time as well, and other work may use the CPUs.
_SHARE = 0.5


class DecodeBacklog:
    """Pixels to decode in all workers of a host, and the measured decoding speed.

    Admission assumes the usual duration of requests. A burst of unusually large images would exceed its deadline.
    """

    def __init__(self, table: WorkerTable, threads: int) -> None:
        """Count in a table; `threads` is the number of decoding threads of the host."""
        self._table = table
        self._column = table.column("decode backlog")
        self._threads = threads
        self._seconds_per_pixel = _INITIAL_SECONDS_PER_PIXEL

    @property
    def pixels(self) -> int:
        """Number of pixels to decode."""
        return self._table.total(self._column)

    def add(self, pixels: int, deadline: Deadline) -> Lease:
        """Count an image until the lease is released. Call this in the event loop.

        Raises:
            GatewayFull: Decoding it and the images before it would take more than half of the remaining time.
        """
        lease = Lease()
        if pixels < _MIN_PIXELS:
            return lease
        self._table.add(self._column, pixels)  # counted first, so that two workers see each other
        total = self.pixels
        seconds = total * self._seconds_per_pixel / self._threads
        if total > pixels and seconds > _SHARE * deadline.remaining:
            self._table.add(self._column, -pixels)
            raise GatewayFull("decoding the image, and those before it, would take too long", "decoding", math.ceil(seconds))
        lease.on_release(lambda: self._table.add(self._column, -pixels))
        return lease

    def measure(self, pixels: int, cpu_seconds: float) -> None:
        """Record the CPU time of decoding an image. Thread-safe."""
        if pixels >= _MIN_PIXELS:
            found = min(max(cpu_seconds / pixels, _FASTEST), _SLOWEST)
            self._seconds_per_pixel += (found - self._seconds_per_pixel) * _SMOOTHING
