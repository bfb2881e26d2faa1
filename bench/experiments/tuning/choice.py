"""Which variant to recommend, of some that were measured in the same rounds."""

from collections.abc import Hashable, Mapping, Sequence
from statistics import median
from typing import TypeVar

from bench.experiments.tuning.trial import Trial

MIN_ROUNDS = 3
"""Fewer do not tell a better variant from a lucky one."""
GAIN = {"throughput": 1.03, "p99": 1.1}
"""How many times as good a variant must be in every round to be better; the p99 of a round is noisier."""

Name = TypeVar("Name", bound=Hashable)


def pareto_front(points: Mapping[Name, tuple[float, float]]) -> list[Name]:
    """Return those of which no other has more throughput and a lower p99, the highest throughput first.

    Args:
        points: Throughput and p99 of each.
    """
    front: list[Name] = []
    lowest = float("inf")
    for name, (_, p99) in sorted(points.items(), key=lambda item: (-item[1][0], item[1][1])):
        if p99 < lowest:
            front.append(name)
            lowest = p99
    return front


def choose(rounds: Mapping[Name, Sequence[Trial]], present: Name) -> Name:
    """Return the best variant: the present one, unless another is better beyond the noise.

    Another one is if, compared round by round, it is better in every round in throughput or in p99, and in the other not worse
    by as much in the median.

    Args:
        rounds: What was measured of each variant, as many rounds of each.
        present: The one in use.
    """
    base = rounds.get(present, ())  # it may have failed
    if len(base) < MIN_ROUNDS:
        return present
    better: dict[Name, float] = {}
    for name, trials in rounds.items():
        ratios = {
            "throughput": [trial.throughput / other.throughput for trial, other in zip(trials, base, strict=True)],
            "p99": [_ratio(other.p99, trial.p99) for trial, other in zip(trials, base, strict=True)],
        }
        is_better = any(min(values) >= GAIN[figure] for figure, values in ratios.items())
        if is_better and all(median(values) > 1 / GAIN[figure] for figure, values in ratios.items()):
            better[name] = median(ratios["throughput"]) * median(ratios["p99"]) ** 0.5
    return max(better, key=better.__getitem__, default=present)


def _ratio(one: float, other: float) -> float:
    return 1.0 if one == other else one / other
