"""Adaptive limit of the requests in progress at one model.

The rule needs no tuning and no prior knowledge of the model's speed: at the limit, a request should take about half of its
deadline. By Little's law this limit keeps a model busy, with or without batching:

    limit <- limit x target duration / measured duration

If only an API key's share of the limit is reached, it grows no further than to

    requests in progress x target duration / measured duration

If images wait in the gateway for the next call of their model, the wait is also limited to two calls: more requests would not make
the batches larger, only the wait longer (`bench overload --models wait_50_batch8`).

The limit grows only if it was reached. If several requests take no longer than a single slow one, the limit grows as long as they
end in time. A rule based only on increasing durations would mistake the batches of a busy model for overload.
"""

from time import monotonic
from typing import NamedTuple

_MIN_SAMPLES = 4
_MIN_SECONDS = 0.25
_MAX_GROWTH = 1.5
_MAX_SHRINK = 0.5
# Factors: duration that equals that of a single request, except for noise; and within the usual deadline, twice the target.
_FLAT, _IN_TIME = 1.2, 1.8
# A request that begins above this fraction of the limit counts as a measurement at the limit.
NEAR = 0.8
_SMOOTHING = 0.1  # weight of the newest request in the averages
# Maximum wait of an image, in calls. With 1, batches would not always be full when requests are late.
_MAX_WAIT_CALLS = 2


class BatchTimes(NamedTuple):
    """Waiting times of a request after its image was ready, in seconds."""

    wait: float
    """Until its call began; 0 if it did not wait."""
    call: float


class ConcurrencyLimit:
    """The limit as measured by one worker, in requests of the whole host."""

    def __init__(self, initial: float, ceiling: float, target_seconds: float) -> None:
        """Start with an initial limit until the first measurement; requests should take `target_seconds` at the limit."""
        self.value = min(initial, ceiling)
        self.pace = 0.0
        """Seconds between the ends of requests while requests are in progress; 0 until measured."""
        self.duration = 0.0
        """Average duration of a request in seconds; 0 until measured."""
        self._ceiling, self._target = ceiling, target_seconds
        self._alone = 0.0
        """Duration of the last request that ran alone, or of a faster one since."""
        self._is_reached = False
        self._restart()

    def note_reached(self) -> None:
        """Record that the limit made a request wait or fail."""
        self._is_reached = True

    def add(  # noqa: PLR0913 - measurements of a request
        self, seconds: float, position: int, limit: float, *, is_near: bool, batch: BatchTimes | None = None, workers: int = 1
    ) -> bool:
        """Add the measurement of a request that has ended, in time or not; return whether `value` was updated.

        When it began, `position` requests were in progress, including itself, and `is_near` tells whether the limit, or the share
        of its API key, was nearly reached. `limit` is the effective one, an average over `workers`.
        """
        is_first = not self.pace
        if is_first:
            self.pace, self.duration = seconds / position, seconds
            self.value = min(max(self._target / self.pace, 1.0), self._ceiling)
        self.pace += (seconds / position - self.pace) * _SMOOTHING
        self.duration += (seconds - self.duration) * _SMOOTHING
        if position == 1 or seconds < self._alone:
            self._alone = seconds
        if not is_near and seconds < self._target:  # not representative of the duration at the limit
            return is_first
        now = monotonic()
        if now - seconds < self._since:  # began under a previous limit
            return is_first
        self._samples += 1
        self._seconds += seconds
        self._positions += position
        if batch is not None:
            self._wait_seconds += batch.wait
            self._call_seconds += batch.call
        # Half of the requests in progress cover several batches; the requests of one batch have the same duration.
        if self._samples < max(_MIN_SAMPLES, position / workers / 2) or now - self._since < _MIN_SECONDS:
            return is_first
        duration = self._seconds / self._samples
        ratio = self._target / duration
        if duration < _FLAT * self._alone and duration < _IN_TIME * self._target:
            ratio = max(ratio, _MAX_GROWTH)
        if self._wait_seconds:
            ratio = min(ratio, _MAX_WAIT_CALLS * self._call_seconds / self._wait_seconds)
        filled = self._positions / self._samples / max(1, int(limit))
        # If only a share of the limit was reached, no more requests than these were measured.
        ratio = min(ratio, max(1.0, ratio * filled)) if filled < NEAR else ratio
        if self._is_reached or ratio < 1:
            self.value = min(max(limit * min(max(ratio, _MAX_SHRINK), _MAX_GROWTH), 1.0), self._ceiling)
        self._is_reached = False
        self._restart()
        return True

    def _restart(self) -> None:
        self._samples, self._positions, self._seconds, self._since = 0, 0, 0.0, monotonic()
        self._wait_seconds = self._call_seconds = 0.0
