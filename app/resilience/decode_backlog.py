"""Backlog of large images to decode: estimates how long it keeps the decoding threads of the host busy."""

import math

from app.errors import GatewayFull
from app.resilience.deadline import Deadline
from app.resilience.fairness import SHADOW, Caller, CallerCounts
from app.resilience.lease import Lease
from app.resilience.worker_table import WorkerTable

# Smaller images are decoded in milliseconds, which is part of the usual duration of a request.
LARGE_PIXELS = 1_000_000
"""Pixels from which an image is large."""
_INITIAL_SECONDS_PER_PIXEL = 12e-9
# Bounds of a measurement, wider than the differences between formats: crafted or nearly empty images must not dominate.
_FASTEST, _SLOWEST = 4e-9, 200e-9
# A single slow image changes little.
_MAX_STEP = 4.0
_SMOOTHING = 0.1  # weight of the newest image in the average
# Fraction of the remaining time for decoding. The model needs time as well, and other work may use the CPUs.
_SHARE = 0.5


class DecodeBacklog:
    """Pixels to decode in all workers of a host, and the measured decoding speed.

    Admission assumes the usual duration of requests. A burst of unusually large images would exceed its deadline.
    """

    def __init__(self, table: WorkerTable, threads: int) -> None:
        """Count in a table; `threads` is the number of decoding threads of the host."""
        self._counts = CallerCounts(table, "decode backlog")
        self._threads = threads
        self._seconds_per_pixel = _INITIAL_SECONDS_PER_PIXEL

    @property
    def pixels(self) -> int:
        """Number of pixels to decode."""
        return self._counts.total

    def add(self, pixels: int, deadline: Deadline, caller: Caller) -> Lease:
        """Count an image until the lease is released; raises GatewayFull if decoding would take more than half of the time left."""
        lease = Lease()
        if pixels < LARGE_PIXELS or caller.priority == SHADOW:  # whose thread does nothing else
            return lease
        self._counts.add(caller, pixels)  # counted first, so that two workers see each other
        ahead = self._counts.until_served(caller)
        seconds = ahead * self._seconds_per_pixel / self._threads
        if ahead > pixels and seconds > _SHARE * deadline.remaining:
            self._counts.add(caller, -pixels)
            raise GatewayFull("decoding the image, and those before it, would take too long", "decoding", math.ceil(seconds))
        lease.on_release(lambda: self._counts.add(caller, -pixels))
        return lease

    def measure(self, pixels: int, seconds: float) -> None:
        """Record how long an image was decoded, also while other work used the CPU. Thread-safe."""
        if pixels >= LARGE_PIXELS:
            found = min(max(seconds / pixels, _FASTEST), _SLOWEST, _MAX_STEP * self._seconds_per_pixel)
            self._seconds_per_pixel += (found - self._seconds_per_pixel) * _SMOOTHING
