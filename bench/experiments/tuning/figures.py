"""Measurements of a variant, and the figures derived from them."""

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from bench.load.outcome import MAX_MICROSECONDS, Outcome, merge_histograms

TOLERATED = 0.01
"""Tolerated share of failed requests."""

_NEVER = float("inf")
_LONGEST = MAX_MICROSECONDS / 1e3


class Trial(msgspec.Struct, frozen=True):
    """One measurement of a variant, with two loads."""

    throughput: float
    """Correct responses per second, with clients that send requests back to back."""
    rate: float
    """Requests per second of the second load, whose rate is fixed."""
    steady: Outcome | None
    """Outcome of the second load; None if it exceeds the capacity of the variant."""


class Figures(NamedTuple):
    """Figures of a variant from one or more trials."""

    throughput: float
    """Correct responses per second."""
    p50: float
    """Median latency in milliseconds at the fixed rate; infinite if the rate exceeds the capacity."""
    p99: float
    """99th percentile, likewise."""

    @property
    def score(self) -> float:
        """Score of the variant. The p99 of a short load is noisy, so it has less weight than throughput."""
        return float(self.throughput / min(self.p99, _LONGEST) ** 0.5)


def figures(trials: Sequence[Trial]) -> Figures:
    """Combine trials: the median of their throughput, and the percentiles of all latencies."""
    throughput = median(trial.throughput for trial in trials)
    steady = [trial.steady for trial in trials if trial.steady is not None and trial.steady.failed <= TOLERATED]
    if len(steady) < len(trials):
        return Figures(throughput, _NEVER, _NEVER)
    latencies = merge_histograms(outcome.latency for outcome in steady)
    p50, p99 = (latencies.get_value_at_percentile(percent) / 1e3 for percent in (50, 99))
    return Figures(throughput, p50, p99)
