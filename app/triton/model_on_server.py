"""The state of one model on one Triton: calls in flight, speed and circuit."""

import math
from time import monotonic
from typing import TYPE_CHECKING

from app.resilience.circuit_breaker import CircuitBreaker

if TYPE_CHECKING:
    from app.triton.backend import TritonBackend

# Weight of earlier measurements, relative to that of the newest answer.
_MEMORY = 0.9
# Answered images if all calls have failed: the speed is low, not unknown.
_NEXT_TO_NONE = 1e-3
# However fast a Triton is, a short pause of its process is not a fault.
_MIN_SILENCE_SECONDS = 0.5
_OUTDATED_SECONDS = 1.0
_LATE, _VERY_LATE = 1.5, 2.0


class ModelOnServer:
    """One model on one Triton, as known to this worker."""

    def __init__(self, server: "TritonBackend") -> None:
        self.server = server
        self.calls = 0
        """In-flight calls that any request still waits for."""
        self.images = 0
        """Images in all in-flight calls."""
        self.circuit: CircuitBreaker | None = None
        """Open while Triton is known not to run the model; None before the first call."""
        self.answered_at = 0.0
        """When Triton last answered for the model, on the `time.monotonic` clock."""
        self._busy_since = 0.0
        """Since when at least one call has been in flight."""
        self._call_seconds = 0.0
        """Duration of the longest recent call."""
        self._shortest_seconds = 0.0
        """Duration of the shortest recent call, divided by its images; 0 if unknown."""
        self.forget_speed()

    @property
    def is_usable(self) -> bool:
        """Whether Triton runs the model, as far as is known."""
        return self.circuit is None or self.circuit.is_closed

    @property
    def is_wrong(self) -> bool:
        """Whether Triton answers for the model, but wrongly, as far as is known."""
        return not self.is_usable and self.circuit is not None and self.circuit.is_wrong

    @property
    def speed(self) -> float:
        """Images per second while calls were in flight; 0 if unknown."""
        return max(self._answered_images, _NEXT_TO_NONE) / self._busy_seconds if self._busy_seconds else 0.0

    def forget_speed(self) -> None:
        """Measure the speed anew, but keep the duration of calls: without it, a slow Triton would be taken for a silent one."""
        self.measured_since = monotonic()
        """Calls that began earlier do not count for the speed."""
        self._answered_images, self._busy_seconds = 0.0, 0.0

    def begin(self, images: int) -> None:
        """Count a call that begins."""
        if not self.images:
            self._busy_since = monotonic()
        self.calls += 1
        self.images += images

    def note_answer(self, images: int, began_at: float, *, is_usable: bool = True) -> None:
        """Measure a call that began at this `time.monotonic` and was answered; with 0 images if the answer was an error."""
        now = monotonic()
        if began_at >= self.measured_since:
            self._answered_images = self._answered_images * _MEMORY + images
            self._busy_seconds = self._busy_seconds * _MEMORY + now - max(self._busy_since, self.answered_at)
            self._call_seconds = max(now - began_at, self._call_seconds * _MEMORY)
            if images and is_usable:  # the end of a hang tells how long it was
                is_recent = now - self.answered_at < _OUTDATED_SECONDS
                shortest = min((now - began_at) / images, self._shortest_seconds / _MEMORY or math.inf)
                self._shortest_seconds = shortest if is_recent else 0.0
        self.answered_at = now

    def may_answer_by(self, at: float) -> bool:
        """Return whether an answer may come in time; not if every recent call took longer per image, and others are in flight."""
        now = monotonic()
        is_outdated = now - self.answered_at > max(_OUTDATED_SECONDS, _LATE * self._call_seconds)
        return not self.images or at - now > self._shortest_seconds or is_outdated

    def is_silent(self, hang_seconds: float) -> bool:
        """Return whether Triton has not answered for much longer than expected; after `hang_seconds`, a call has failed anyway."""
        if not self.images:
            return False
        expected = self.images / self.speed if self.speed else hang_seconds
        patience = max(_MIN_SILENCE_SECONDS, self._call_seconds * _LATE, min(expected * _VERY_LATE, hang_seconds / _VERY_LATE))
        return monotonic() - max(self._busy_since, self.answered_at) > patience


class InFlightCall:
    """An in-flight call, which counts at one Triton until it has ended."""

    def __init__(self, served: ModelOnServer, images: int) -> None:
        self._images = images
        self._is_awaited = False
        self._enter(served)

    def move(self, served: ModelOnServer) -> None:
        """Move the call to another Triton, for the requests that still wait."""
        self.end()
        self._enter(served)

    def leave(self) -> None:
        """Note that no request waits for the call any more."""
        if self._is_awaited:
            self._is_awaited = False
            self.served.calls -= 1

    def end(self) -> None:
        """Note that the call has ended."""
        self.leave()
        self.served.images -= self._images

    def _enter(self, served: ModelOnServer) -> None:
        self.served = served
        self._is_awaited = True
        self.reads_slot = False
        """Whether Triton reads the images from shared memory."""
        self.began_at = monotonic()
        served.begin(self._images)
