"""How many requests of one model may be in progress, found by measurement.

The rule needs no tuning and no idea of the model's speed: requests should take about half of their deadline while as
many as allowed are in progress. By Little's law that many keep a model busy, whether it works one by one or in batches:

    limit <- limit x target duration / measured duration

Where images wait in the gateway for the next call of their model, that wait should not be longer than two calls either: more
requests would not make the batches any larger, and only wait longer (`bench overload --models wait_50_batch8`).

The limit grows only if it was reached. A model that takes long even for a single request, but not longer for several, gets more of
them as long as they end in time. A rule on the growth of the duration alone would take the batches of a busy model for overload.
"""

from time import monotonic
from typing import NamedTuple

_MIN_SAMPLES = 4
_MIN_SECONDS = 0.25
_MAX_GROWTH = 1.5
_MAX_SHRINK = 0.5
# No longer than alone, but for noise; within the usual deadline, of which the target is half.
_FLAT, _IN_TIME = 1.2, 1.8
_SMOOTHING = 0.1  # weight of the newest request in the averages
# How many calls an image may wait for, before its own. With one, batches are not always full when requests are late.
_MAX_WAIT_CALLS = 2


class BatchTimes(NamedTuple):
    """What a request waited for after its image was ready, seconds."""

    wait: float
    """For its call to begin; 0 if nothing lets it wait."""
    call: float
    """For the call to end."""


class ConcurrencyLimit:
    """The limit as one worker sees it, in requests of the whole host."""

    def __init__(self, initial: float, ceiling: float, target_seconds: float) -> None:
        """Start with a limit.

        Args:
            initial: The limit until a request has been measured.
            ceiling: The largest limit.
            target_seconds: How long requests should take while the limit is reached.
        """
        self.value = min(initial, ceiling)
        self.pace = 0.0
        """Seconds between the ends of requests, while there are some in progress; 0 until measured."""
        self.duration = 0.0
        """Seconds that a request takes; 0 until measured."""
        self._ceiling, self._target = ceiling, target_seconds
        self._alone = 0.0
        """Seconds that a request takes alone, or less if another took less since."""
        self._is_reached = False
        self._restart()

    def note_reached(self) -> None:
        """Note that a request was rejected, or had to wait, because of the limit."""
        self._is_reached = True

    def add(  # noqa: PLR0913 - what there is to know of a request
        self, seconds: float, position: int, limit: float, *, is_near: bool, batch: BatchTimes | None = None, workers: int = 1
    ) -> bool:
        """Measure a request that has ended, in time or not; return whether `value` was found anew.

        Args:
            seconds: How long it was in progress.
            position: How many requests were in progress when it began, itself included.
            limit: The limit in force, which is an average over workers.
            is_near: Whether almost as many as allowed were in progress when it began.
            batch: Its part in a batch, if it was in one.
            workers: Number of workers that measure their part of the requests.
        """
        is_first = not self.pace
        if is_first:
            self.pace, self.duration = seconds / position, seconds
            self.value = min(max(self._target / self.pace, 1.0), self._ceiling)
        self.pace += (seconds / position - self.pace) * _SMOOTHING
        self.duration += (seconds - self.duration) * _SMOOTHING
        if position == 1 or seconds < self._alone:
            self._alone = seconds
        if not is_near and seconds < self._target:  # it says little about the duration at the limit
            return is_first
        now = monotonic()
        if now - seconds < self._since:  # it began under another limit
            return is_first
        self._samples += 1
        self._seconds += seconds
        if batch is not None:
            self._wait_seconds += batch.wait
            self._call_seconds += batch.call
        # Half of those in progress are several batches, whose requests all take as long.
        if self._samples < max(_MIN_SAMPLES, position / workers / 2) or now - self._since < _MIN_SECONDS:
            return is_first
        duration = self._seconds / self._samples
        ratio = self._target / duration
        if duration < _FLAT * self._alone and duration < _IN_TIME * self._target:
            ratio = _MAX_GROWTH
        if self._wait_seconds:
            ratio = min(ratio, _MAX_WAIT_CALLS * self._call_seconds / self._wait_seconds)
        if self._is_reached or ratio < 1:
            self.value = min(max(limit * min(max(ratio, _MAX_SHRINK), _MAX_GROWTH), 1.0), self._ceiling)
        self._is_reached = False
        self._restart()
        return True

    def _restart(self) -> None:
        self._samples, self._seconds, self._since = 0, 0.0, monotonic()
        self._wait_seconds = self._call_seconds = 0.0
