"""What one Triton has shown of one model: what is under way there, how fast it is, and whether it works."""

from time import monotonic

from app.resilience.circuit_breaker import CircuitBreaker
from app.triton.endpoint import Endpoint

# Weight of what is known, relative to that of the newest answer.
_MEMORY = 0.9
# One that has only failed is slow, and not unknown.
_NEXT_TO_NONE = 1e-3
# A Triton is not silent sooner, however fast it is: a pause of its process is no fault.
_MIN_SILENCE_SECONDS = 0.5
_LATE, _VERY_LATE = 1.5, 2.0


class ModelOnServer:
    """One model on one Triton, as one worker knows it."""

    def __init__(self, server: Endpoint) -> None:
        """Start without calls to that Triton."""
        self.server = server
        self.calls = 0
        """Calls that are under way, and that some request still waits for."""
        self.images = 0
        """Images in all calls that are under way."""
        self.circuit: CircuitBreaker | None = None
        """Open while Triton is known not to run the model; None before the first call."""
        self.answered_at = 0.0
        """When Triton last answered for the model, as `time.monotonic` counts."""
        self._busy_since = 0.0
        """When calls began to be under way."""
        self._call_seconds = 0.0
        """How long a call takes."""
        self.forget_speed()

    @property
    def is_usable(self) -> bool:
        """Whether Triton runs the model, as far as is known."""
        return self.circuit is None or self.circuit.is_closed

    @property
    def speed(self) -> float:
        """Images per second while calls were under way; 0 if it is not known."""
        return max(self._answered_images, _NEXT_TO_NONE) / self._busy_seconds if self._busy_seconds else 0.0

    def forget_speed(self) -> None:
        """Measure the speed anew: Triton may be another one now.

        How long a call takes stays known: a slow one would seem silent again.
        """
        self.measured_since = monotonic()
        """Calls from before say nothing about the speed."""
        self._answered_images, self._busy_seconds = 0.0, 0.0

    def begin(self, images: int) -> None:
        """Count a call that begins."""
        if not self.images:
            self._busy_since = monotonic()
        self.calls += 1
        self.images += images

    def note_answer(self, images: int, began_at: float) -> None:
        """Measure a call that was answered.

        Args:
            images: How many it had that were processed; none if it was answered with an error.
            began_at: When it began.
        """
        now = monotonic()
        if began_at >= self.measured_since:
            self._answered_images = self._answered_images * _MEMORY + images
            self._busy_seconds = self._busy_seconds * _MEMORY + now - max(self._busy_since, self.answered_at)
            self._call_seconds = max(now - began_at, self._call_seconds * _MEMORY)
        self.answered_at = now

    def is_silent(self, hang_seconds: float) -> bool:
        """Return whether Triton has answered nothing for much longer than it should take.

        Args:
            hang_seconds: A call that has no answer after this time has failed.
        """
        if not self.images:
            return False
        expected = self.images / self.speed if self.speed else hang_seconds
        patience = max(_MIN_SILENCE_SECONDS, self._call_seconds * _LATE, min(expected * _VERY_LATE, hang_seconds / _VERY_LATE))
        return monotonic() - max(self._busy_since, self.answered_at) > patience


class InFlightCall:
    """Where a call is under way: it counts there until it has ended."""

    def __init__(self, served: ModelOnServer, images: int) -> None:
        """Begin a call.

        Args:
            served: The model, on the Triton that is called.
            images: How many it has.
        """
        self._images = images
        self._is_awaited = False
        self._enter(served)

    def move(self, served: ModelOnServer) -> None:
        """Call another Triton instead, for requests that still wait."""
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
        """Whether Triton reads the shared memory of the images."""
        self.began_at = monotonic()
        served.begin(self._images)
