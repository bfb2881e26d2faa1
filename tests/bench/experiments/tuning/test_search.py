"""The search on made-up models."""

from collections.abc import Callable
from functools import partial

from bench.experiments.tuning.figures import Trial
from bench.experiments.tuning.search import search
from bench.experiments.tuning.variant import Variant, neighbour
from tests.bench.experiments.tuning.support import make_trial

START = Variant(instances=1, threads=1, max_batch=1, delay_us=0, calls=0)
STEP = partial(neighbour, cores=4, devices=1)


def _find(measure: Callable[[Variant], Trial | None]) -> tuple[Variant, dict[Variant, Trial]]:
    first = measure(START)
    assert first is not None
    tried = search(START, first, STEP, measure)
    return max(tried, key=lambda variant: tried[variant].throughput), tried


def test_the_search_finds_the_best_of_several_dimensions() -> None:
    def measure(variant: Variant) -> Trial:
        assert variant.instances is not None
        assert variant.max_batch is not None
        return make_trial(100.0 - 10 * abs(variant.instances - 3) - 5 * abs(variant.max_batch - 4))

    best, tried = _find(measure)

    assert best == Variant(instances=3, threads=1, max_batch=4, delay_us=0, calls=0)
    assert len(tried) < 20


def test_the_search_ends_when_the_time_is_over() -> None:
    asked: list[Variant] = []

    def measure(variant: Variant) -> Trial | None:
        asked.append(variant)
        return make_trial(10.0 * len(asked)) if len(asked) <= 3 else None

    _, tried = _find(measure)

    assert list(tried) == asked[:3]
    assert len(asked) == len(set(asked))
