"""Measure the most promising variants again, together with the current one, in interleaved rounds."""

from collections.abc import Callable, Mapping, Sequence

from bench.experiments.tuning.choice import MIN_ROUNDS, pareto_front
from bench.experiments.tuning.figures import Trial, figures
from bench.experiments.tuning.variant import Variant

_MAX_ROUNDS = 5
_MAX_VARIANTS = 4


def finalists(tried: Mapping[Variant, Trial], present: Variant, trials: int) -> list[Variant]:
    """Return the current variant and the best other variants: first those on the Pareto front, then the rest.

    Args:
        tried: The measurement of each variant.
        present: The current variant.
        trials: Number of trials that there is time for. At least one other variant is returned, if there is one.
    """
    found = {variant: figures([trial]) for variant, trial in tried.items()}
    front = pareto_front(found)
    others = sorted(found.keys() - {present}, key=lambda variant: (variant in front, found[variant].score), reverse=True)
    count = min(max(trials // MIN_ROUNDS, 2), _MAX_VARIANTS)
    return [present, *others][:count]


def hold_rounds(
    variants: Sequence[Variant], measure: Callable[[Variant, float | None], Trial | None], trials_left: Callable[[], int]
) -> dict[Variant, list[Trial]]:
    """Measure all variants in rounds, as long as there are at least two. The first variant of a round determines the rate.

    Args:
        variants: The variants to measure.
        measure: Measures a variant at a rate, or at its own rate; returns None if it cannot be run, which excludes it.
        trials_left: Returns the number of trials that there is time for. The minimum number of rounds is always run.
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
