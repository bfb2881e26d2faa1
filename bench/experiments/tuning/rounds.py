"""Measuring the most promising variants again, together with the present one, in interleaved rounds."""

from collections.abc import Callable, Mapping, Sequence

from bench.experiments.tuning.choice import MIN_ROUNDS, pareto_front
from bench.experiments.tuning.figures import Trial, figures
from bench.experiments.tuning.variant import Variant

_MAX_ROUNDS = 5
_MAX_VARIANTS = 4


def finalists(tried: Mapping[Variant, Trial], present: Variant, trials: int) -> list[Variant]:
    """Return the present variant and, best first, others that deserve another look: those on the Pareto front before the rest.

    Args:
        tried: What was measured of each.
        present: The one in use.
        trials: For how many there is time. One other variant deserves it in any case, if there is one.
    """
    found = {variant: figures([trial]) for variant, trial in tried.items()}
    front = pareto_front(found)
    others = sorted(found.keys() - {present}, key=lambda variant: (variant in front, found[variant].score), reverse=True)
    count = min(max(trials // MIN_ROUNDS, 2), _MAX_VARIANTS)
    return [present, *others][:count]


def hold_rounds(
    variants: Sequence[Variant], measure: Callable[[Variant, float | None], Trial | None], trials_left: Callable[[], int]
) -> dict[Variant, list[Trial]]:
    """Measure round after round of all variants, as many of each, while there are two. The first one of a round tells its rate.

    Args:
        variants: What to measure.
        measure: Measures one at a rate, or a rate of its own; returns None if it cannot be run, which ends its part.
        trials_left: Returns for how many trials there is time. The rounds that a choice takes are held in any case.
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
