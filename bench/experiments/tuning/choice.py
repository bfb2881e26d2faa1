"""Which variant to recommend, of some that were measured in the same rounds."""

from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from bench.experiments.tuning.figures import Figures, Trial, figures

MIN_ROUNDS = 3
"""Fewer do not tell a better variant from a lucky one."""
GAIN = 1.05
"""How many times the present variant's score another one must have in every round."""
MAX_LOSS = Figures(throughput=1.03, p50=float("inf"), p99=1.1)
"""How many times as bad its figures of all rounds together may be."""

Name = TypeVar("Name", bound=Hashable)


def pareto_front(points: Mapping[Name, Figures]) -> list[Name]:
    """Return those of which no other has more throughput and a lower p99, the highest throughput first."""
    front: list[Name] = []
    lowest = float("inf")
    for name, point in sorted(points.items(), key=lambda item: (-item[1].throughput, item[1].p99)):
        if point.p99 < lowest:
            front.append(name)
            lowest = point.p99
    return front


def choose(rounds: Mapping[Name, Sequence[Trial]], present: Name) -> Name:
    """Return the best variant: the present one, unless another is better beyond the noise.

    Another one must have the better score in every round, because the machine may have been busy in some of them, and must not be
    worse in throughput or p99.

    Args:
        rounds: What was measured of each variant, as many rounds of each.
        present: The one in use.
    """
    base = rounds.get(present, ())  # it may have failed
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
