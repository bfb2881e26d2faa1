"""Search for better variants: one dimension after the other, step by step, while there is time."""

from collections.abc import Callable

from bench.experiments.tuning.figures import Trial, figures
from bench.experiments.tuning.variant import DIMENSIONS, DOWN, UP, Dimension, Direction, Variant

WORTH = 1.02
"""Minimum improvement of the score for a step."""

Step = Callable[[Variant, Dimension, Direction], Variant | None]
"""Returns the neighbour of a variant, or None."""


def search(start: Variant, first: Trial, step: Step, measure: Callable[[Variant], Trial | None]) -> dict[Variant, Trial]:
    """Move to better neighbours of a variant until there is none.

    Args:
        start: The first variant.
        first: Its measurement.
        step: Returns the neighbour of a variant.
        measure: Measures a variant, each once; returns None if it cannot be run, or if there is no time left.

    Returns:
        All measurements, in order.
    """
    tried: dict[Variant, Trial | None] = {start: first}

    def score_of(variant: Variant) -> float:
        if variant not in tried:
            tried[variant] = measure(variant)
        trial = tried[variant]
        return 0.0 if trial is None else figures([trial]).score

    best, previous = start, None
    while best != previous:
        previous = best
        for dimension in DIMENSIONS:
            best = _climb(best, dimension, step, score_of)
    return {variant: trial for variant, trial in tried.items() if trial is not None}


def _climb(start: Variant, dimension: Dimension, step: Step, score_of: Callable[[Variant], float]) -> Variant:
    """Move in one dimension as long as the score improves: upwards, or otherwise downwards."""
    best = start
    for direction in UP, DOWN:
        while (following := step(best, dimension, direction)) is not None and score_of(following) > score_of(best) * WORTH:
            best = following
        if best != start:
            break
    return best
