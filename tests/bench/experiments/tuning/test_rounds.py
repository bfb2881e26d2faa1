"""The rounds in which the best variants are compared."""

from bench.experiments.tuning.figures import Trial
from bench.experiments.tuning.rounds import finalists, hold_rounds
from bench.experiments.tuning.variant import Variant
from tests.bench.experiments.tuning.support import make_trial

PRESENT, FAST, QUICK, WORSE = (Variant(instances=count) for count in (1, 2, 3, 4))
TRIED = {PRESENT: make_trial(20.0, 10.0), WORSE: make_trial(19.0, 11.0), QUICK: make_trial(15.0, 5.0), FAST: make_trial(30.0, 12.0)}


def test_the_front_is_compared_with_the_present_variant() -> None:
    assert finalists(TRIED, PRESENT, trials=9) == [PRESENT, FAST, QUICK]
    assert finalists(TRIED, PRESENT, trials=100) == [PRESENT, FAST, QUICK, WORSE]
    assert finalists(TRIED, PRESENT, trials=0) == [PRESENT, FAST]
    assert finalists({PRESENT: TRIED[PRESENT]}, PRESENT, trials=9) == [PRESENT]


def test_rounds_are_interleaved_at_the_rate_of_the_first_variant() -> None:
    asked: list[tuple[Variant, float | None]] = []

    def measure(variant: Variant, rate: float | None) -> Trial | None:
        asked.append((variant, rate))
        return None if variant == QUICK else TRIED[variant]

    rounds = hold_rounds([PRESENT, QUICK, FAST], measure, lambda: 0)

    assert asked == [(PRESENT, None), (QUICK, 5.0), (FAST, 5.0), *[(PRESENT, None), (FAST, 5.0)] * 2]
    assert {variant: len(trials) for variant, trials in rounds.items()} == {PRESENT: 3, FAST: 3}


def test_more_rounds_are_held_while_there_is_time() -> None:
    left = iter([2, 1])

    assert len(hold_rounds([PRESENT, FAST], lambda variant, _: TRIED[variant], lambda: next(left))[FAST]) == 4
    assert len(hold_rounds([PRESENT, FAST], lambda variant, _: TRIED[variant], lambda: 100)[FAST]) == 5


def test_no_round_is_held_if_there_is_nothing_to_compare() -> None:
    assert hold_rounds([PRESENT], lambda _variant, _rate: None, lambda: 100) == {}
