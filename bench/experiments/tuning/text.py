"""Output of tuning."""

from collections.abc import Iterator, Mapping, Sequence

from bench.experiments.tuning.choice import GAIN, MIN_ROUNDS, pareto_front
from bench.experiments.tuning.figures import Figures, Trial, figures
from bench.experiments.tuning.variant import Variant


def trial_line(variant: Variant, trial: Trial) -> str:
    """Describe one trial."""
    return _line(" ", figures([trial]), str(variant))


def result_lines(
    tried: Mapping[Variant, Trial], rounds: Mapping[Variant, Sequence[Trial]], present: Variant, chosen: Variant
) -> Iterator[str]:
    """Describe all measurements, with the Pareto front marked, and the choice.

    Args:
        tried: Measurements of the search.
        rounds: Measurements of some variants in interleaved rounds.
        present: The current variant.
        chosen: The recommended variant.
    """
    found = {variant: figures(trials) for variant, trials in rounds.items()}
    count = min(map(len, rounds.values()), default=0)
    front = pareto_front(found)
    yield f"  {'images/s':>8} {'p50 ms':>8} {'p99 ms':>8}   {count} interleaved rounds; *: on the Pareto front"
    for variant, values in sorted(found.items(), key=lambda item: -item[1].throughput):
        note = " (present)" if variant == present else ""
        yield _line("*" if variant in front else " ", values, f"{variant}{note}")
    rest = {variant: trial for variant, trial in tried.items() if variant not in rounds}
    if rest:
        yield f"  {'':26}   tried once:"
        yield from (trial_line(variant, trial) for variant, trial in rest.items())
    if chosen != present:
        then, now = found[chosen], found[present]
        yield f"choice: {chosen}: {then.throughput / now.throughput:.2f} x the throughput, {then.p99 / now.p99:.2f} x the p99"
    elif count < MIN_ROUNDS:
        yield "choice: as it is; it could not be compared with another"
    else:
        yield f"choice: as it is; nothing was better by {GAIN - 1:.0%} in every round"


def _line(mark: str, values: Figures, text: str) -> str:
    latencies = " ".join("       -" if value == float("inf") else f"{value:8.1f}" for value in values[1:])
    return f"{mark} {values.throughput:8.1f} {latencies}   {text}"
