"""What trials say of a variant."""

from bench.experiments.tuning.figures import Figures, Trial, figures
from tests.bench.experiments.tuning.support import make_trial
from tests.bench.support import make_outcome


def test_trials_are_summed_up() -> None:
    found = figures([make_trial(10.0, 5.0), make_trial(30.0, 5.0), make_trial(20.0, 50.0)])

    assert found.throughput == 20.0
    assert (round(found.p50), round(found.p99)) == (5, 50)


def test_a_load_that_was_too_much_once_has_no_latency() -> None:
    rejected = Trial(20.0, 15.0, make_outcome([5.0] * 95, s200=95, s429=5))

    for trial in (make_trial(20.0, None), rejected):
        assert figures([make_trial(20.0), trial]) == Figures(20.0, float("inf"), float("inf"))
    assert figures([make_trial(20.0, None)]).score > figures([make_trial(10.0, None)]).score


def test_throughput_counts_more_than_latency() -> None:
    assert Figures(20.0, 5.0, 10.0).score > Figures(10.0, 5.0, 5.0).score > Figures(10.0, 5.0, 10.0).score
