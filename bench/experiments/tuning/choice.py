"""Choice of a variant among those measured in the same rounds."""

from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from bench.experiments.tuning.figures import Figures, Trial, figures

MIN_ROUNDS = 3
"""With fewer rounds, noise could decide."""
GAIN = 1.05
"""Factor by which a variant's score must exceed the current one's in every round."""
MAX_LOSS = Figures(throughput=1.03, p50=float("inf"), p99=1.1)
"""Factors by which its figures over all rounds may be worse."""

Name = TypeVar("Name", bound=Hashable)


def pareto_front(points: Mapping[Name, Figures]) -> list[Name]:
    """Return the points for which no other has more throughput and a lower p99, by descending throughput."""
    front: list[Name] = []
    lowest = float("inf")
    for name, point in sorted(points.items(), key=lambda item: (-item[1].throughput, item[1].p99)):
        if point.p99 < lowest:
            front.append(name)
            lowest = point.p99
    return front


def choose(rounds: Mapping[Name, Sequence[Trial]], present: Name) -> Name:
    """Return the best variant: the current one, unless another one is better beyond the noise.

    Another variant must have the better score in every round, because the machine may have been busy in some rounds. It must not be
    worse in throughput or p99.

    Args:
        rounds: Measurements of each variant, with the same number of rounds.
        present: The current variant.
    """
    base = rounds.get(present, ())  # empty if it failed
    if len(base) < MIN_ROUNDS:
        return present
    now = figures(base)
    better: dict[Name, float] = {}
    for name, trials in rounds.items():
        gains = [figures([trial]).score / figures([other]).score for trial, other in zip(trials, base, strict=True)]
        then = figures(trials)
        is_worse = then.throughput * MAX_LOSS.throughput < now.throughput or then.p99 > now.p99 * MAX_LOSS.p99
        if min(gains) >= GAIN and not is_worse:
            better[name] = median(gains)
    return max(better, key=better.__getitem__, default=present)
