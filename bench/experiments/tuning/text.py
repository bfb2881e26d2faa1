"""What tuning tells the user."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from bench.experiments.tuning.choice import GAIN, MIN_ROUNDS, pareto_front
from bench.experiments.tuning.trial import Trial
from bench.experiments.tuning.variant import Variant
from bench.load.outcome import merge_histograms


def trial_line(variant: Variant, trial: Trial) -> str:
    """Describe one trial."""
    return _line(" ", trial.throughput, *_percentiles([trial]), str(variant))


def result_lines(
    tried: Mapping[Variant, Trial], rounds: Mapping[Variant, Sequence[Trial]], present: Variant, chosen: Variant
) -> Iterator[str]:
    """Describe everything that was measured, the Pareto front marked, and the choice.

    Args:
        tried: What the search has measured.
        rounds: What was measured of some of them in interleaved rounds.
        present: The variant in use.
        chosen: The one to recommend.
    """
    figures = {variant: (median(trial.throughput for trial in trials), *_percentiles(trials)) for variant, trials in rounds.items()}
    front = pareto_front({variant: (throughput, p99) for variant, (throughput, _, p99) in figures.items()})
    count = min((len(trials) for trials in rounds.values()), default=0)
    yield f"  {'images/s':>8} {'p50 ms':>8} {'p99 ms':>8}   medians of {count} interleaved rounds; *: Pareto front"
    for variant, values in sorted(figures.items(), key=lambda item: -item[1][0]):
        note = " (present)" if variant == present else ""
        yield _line("*" if variant in front else " ", *values, f"{variant}{note}")
    rest = {variant: trial for variant, trial in tried.items() if variant not in rounds}
    if rest:
        yield "  tried once, and not better then:"
        yield from (trial_line(variant, trial) for variant, trial in rest.items())
    if chosen != present:
        (throughput, _, p99), (throughput_now, _, p99_now) = figures[chosen], figures[present]
        yield f"choice: {chosen}: {throughput / throughput_now:.2f} x the throughput, {p99 / p99_now:.2f} x the p99"
    elif count < MIN_ROUNDS:
        yield "choice: as it is; the time was too short to compare it with another"
    else:
        gains = f"{GAIN['throughput'] - 1:.0%} in throughput or {GAIN['p99'] - 1:.0%} in p99"
        yield f"choice: as it is; nothing was better in each round by {gains} without being worse in the other"


def _percentiles(trials: Sequence[Trial]) -> tuple[float, float]:
    """Return the p50 and the p99 of some trials together; infinite if one of them did not bear the rate."""
    histogram = merge_histograms(trial.steady.latency for trial in trials if trial.steady is not None)
    if any(trial.p99 == float("inf") for trial in trials) or not histogram.total_count:
        return float("inf"), float("inf")
    return histogram.get_value_at_percentile(50) / 1e3, histogram.get_value_at_percentile(99) / 1e3


def _line(mark: str, throughput: float, p50: float, p99: float, text: str) -> str:
    latencies = " ".join("       -" if value == float("inf") else f"{value:8.1f}" for value in (p50, p99))
    return f"{mark} {throughput:8.1f} {latencies}   {text}"
