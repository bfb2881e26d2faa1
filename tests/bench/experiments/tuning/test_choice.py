"""Pareto front, and which variant is recommended."""

import pytest

from bench.experiments.tuning.choice import choose, pareto_front
from bench.experiments.tuning.figures import Figures
from tests.bench.experiments.tuning.support import make_trial

PRESENT = [make_trial(rate, 10.0) for rate in (20.0, 10.0, 21.0)]


def test_the_front_has_the_variants_that_no_other_beats() -> None:
    points = {
        "fast": Figures(30.0, 5.0, 20.0),
        "as fast": Figures(30.0, 5.0, 25.0),
        "between": Figures(25.0, 5.0, 10.0),
        "worse": Figures(24.0, 1.0, 10.0),
        "quick": Figures(20.0, 5.0, 5.0),
        "overloaded": Figures(40.0, float("inf"), float("inf")),
    }

    assert pareto_front(points) == ["fast", "between", "quick"]


def test_a_better_variant_is_chosen_though_the_machine_was_busy() -> None:
    rounds = {
        "present": PRESENT,
        "better": [make_trial(rate, 10.0) for rate in (22.0, 11.0, 23.5)],
        "best": [make_trial(rate, 9.0) for rate in (24.0, 12.0, 25.0)],
    }

    assert choose(rounds, "present") == "best"


@pytest.mark.parametrize(
    "other",
    [
        [make_trial(20.2, 9.9), make_trial(10.1, 9.9), make_trial(21.2, 9.9)],
        [make_trial(40.0), make_trial(10.0), make_trial(40.0)],
        [make_trial(40.0, 20.0), make_trial(20.0, 20.0), make_trial(42.0, 20.0)],
        [make_trial(18.0, 1.0), make_trial(9.0, 1.0), make_trial(19.0, 1.0)],
        [make_trial(40.0), make_trial(20.0), make_trial(40.0, None)],
    ],
    ids=["hardly better", "better but once", "latency lost", "throughput lost", "overloaded once"],
)
def test_the_present_variant_stays_within_the_noise(other: list) -> None:  # type: ignore[type-arg]
    assert choose({"present": PRESENT, "other": other}, "present") == "present"


def test_two_rounds_do_not_justify_a_change() -> None:
    better = [make_trial(100.0, 1.0)] * 2

    assert choose({"present": PRESENT[:2], "other": better}, "present") == "present"
    assert choose({"other": better}, "present") == "present"
