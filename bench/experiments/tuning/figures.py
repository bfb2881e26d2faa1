"""What was measured of a variant, and what that says of it."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from bench.load.outcome import MAX_MICROSECONDS, Outcome, merge_histograms

TOLERATED = 0.01
"""Share of failed requests that is no reason to leave a variant out."""

_NEVER = float("inf")
_LONGEST = MAX_MICROSECONDS / 1e3


class Trial(msgspec.Struct, frozen=True):
    """What was measured of a variant, once, with two loads."""

    throughput: float
    """Correct answers per second, of clients that ask again at once."""
    rate: float
    """Requests per second of the second load, whose rate is fixed."""
    steady: Outcome | None
    """What that load got; None if it is more than this variant can bear."""


class Figures(NamedTuple):
    """What one trial, or several, say of a variant."""

    throughput: float
    """Correct answers per second."""
    p50: float
    """Milliseconds at the fixed rate; infinite if it is more than this variant can bear."""
    p99: float
    """In the same way."""

    @property
    def score(self) -> float:
        """How good that is. The p99 of a short load is noisy, so it counts less than throughput."""
        return float(self.throughput / min(self.p99, _LONGEST) ** 0.5)


def figures(trials: Sequence[Trial]) -> Figures:
    """Sum up trials: the median of their throughput, and the percentiles of all their latencies together."""
    throughput = median(trial.throughput for trial in trials)
    steady = [trial.steady for trial in trials if trial.steady is not None and trial.steady.failed <= TOLERATED]
    if len(steady) < len(trials):
        return Figures(throughput, _NEVER, _NEVER)
    latencies = merge_histograms(outcome.latency for outcome in steady)
    p50, p99 = (latencies.get_value_at_percentile(percent) / 1e3 for percent in (50, 99))
    return Figures(throughput, p50, p99)
