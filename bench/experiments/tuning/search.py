"""The search for better variants, the comparison of the best ones in interleaved rounds, and the choice among them."""

from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import NamedTuple

import msgspec

from bench.experiments.tuning.variant import DIMENSIONS, DOWN, UP, Dimension, Direction, Variant
from bench.load.outcome import MAX_MICROSECONDS, Outcome, merge_histograms

TOLERATED = 0.01
"""Tolerated share of failed requests."""
WORTH = 1.02
"""Minimum improvement of the score for a step of the search."""
MIN_ROUNDS = 3
"""With fewer rounds, noise could decide."""
GAIN = 1.05
"""Factor by which a variant's score must exceed the current one's in every round."""

_MAX_LOSS_OF_THROUGHPUT, _MAX_LOSS_OF_P99 = 1.03, 1.1  # factors by which the figures over all rounds may be worse
_MAX_ROUNDS, _MAX_VARIANTS = 5, 4
_NEVER = float("inf")

Step = Callable[[Variant, Dimension, Direction], Variant | None]
"""Returns the neighbour of a variant, or None."""


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
        return float(self.throughput / min(self.p99, MAX_MICROSECONDS / 1e3) ** 0.5)


def figures(trials: Sequence[Trial]) -> Figures:
    """Combine trials: the median of their throughput, and the percentiles of all latencies."""
    throughput = median(trial.throughput for trial in trials)
    steady = [trial.steady for trial in trials if trial.steady is not None and trial.steady.failed <= TOLERATED]
    if len(steady) < len(trials):
        return Figures(throughput, _NEVER, _NEVER)
    latencies = merge_histograms(outcome.latency for outcome in steady)
    p50, p99 = (latencies.get_value_at_percentile(percent) / 1e3 for percent in (50, 99))
    return Figures(throughput, p50, p99)


def search(start: Variant, first: Trial, step: Step, measure: Callable[[Variant], Trial | None]) -> dict[Variant, Trial]:
    """Move from a variant, whose trial is `first`, to better neighbours, one dimension after the other, until there is none.

    `measure` returns None if a variant cannot be run, or if there is no time left. The result has all measurements, in order.
    """
    tried: dict[Variant, Trial | None] = {start: first}

    def score_of(variant: Variant) -> float:
        if variant not in tried:
            tried[variant] = measure(variant)
        trial = tried[variant]
        return 0.0 if trial is None else figures([trial]).score

    def climb(base: Variant, dimension: Dimension) -> Variant:
        best = base
        for direction in UP, DOWN:
            while (following := step(best, dimension, direction)) is not None and score_of(following) > score_of(best) * WORTH:
                best = following
            if best != base:
                break
        return best

    best, previous = start, None
    while best != previous:
        previous = best
        for dimension in DIMENSIONS:
            best = climb(best, dimension)
    return {variant: trial for variant, trial in tried.items() if trial is not None}


def finalists(tried: Mapping[Variant, Trial], present: Variant, trials: int) -> list[Variant]:
    """Return the current variant and the best others, as far as there is time for `trials`.

    At least one other variant is returned, if there is one.
    """
    scores = {variant: figures([trial]).score for variant, trial in tried.items()}
    others = sorted(scores.keys() - {present}, key=scores.__getitem__, reverse=True)
    return [present, *others][: min(max(trials // MIN_ROUNDS, 2), _MAX_VARIANTS)]


def hold_rounds(
    variants: Sequence[Variant], measure: Callable[[Variant, float | None], Trial | None], trials_left: Callable[[], int]
) -> dict[Variant, list[Trial]]:
    """Measure all variants in rounds, as long as there are at least two. The first variant of a round determines the rate.

    `measure` returns None if a variant cannot be run, which excludes it. `trials_left` returns the number of trials that there is
    time for; the minimum number of rounds is always run.
    """
    rounds: dict[Variant, list[Trial]] = {variant: [] for variant in variants}
    for number in range(_MAX_ROUNDS):
        if len(rounds) == 1 or (number >= MIN_ROUNDS and trials_left() < len(rounds)):
            break
        rate = None
        for variant in list(rounds):
            trial = measure(variant, rate)
            if trial is None:
                del rounds[variant]
            else:
                rate = trial.rate
                rounds[variant].append(trial)
    return {variant: trials for variant, trials in rounds.items() if trials}


def choose(rounds: Mapping[Variant, Sequence[Trial]], present: Variant) -> Variant:
    """Return the best variant: the current one, unless another one is better beyond the noise.

    Another variant must have the better score in every round, because the machine may have been busy in some rounds. It must not be
    worse in throughput or p99.
    """
    base = rounds.get(present, ())  # empty if it failed
    if len(base) < MIN_ROUNDS:
        return present
    now = figures(base)
    better: dict[Variant, float] = {}
    for variant, trials in rounds.items():
        gains = [figures([trial]).score / figures([other]).score for trial, other in zip(trials, base, strict=True)]
        then = figures(trials)
        is_worse = then.throughput * _MAX_LOSS_OF_THROUGHPUT < now.throughput or then.p99 > now.p99 * _MAX_LOSS_OF_P99
        if min(gains) >= GAIN and not is_worse:
            better[variant] = median(gains)
    return max(better, key=better.__getitem__, default=present)
