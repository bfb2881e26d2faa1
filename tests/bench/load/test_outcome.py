"""Numbers of a run."""

import pytest

from bench.load.outcome import MAX_MICROSECONDS, encode_latencies, merge_histograms
from tests.bench.support import make_outcome


def test_percentiles_are_those_of_the_latencies() -> None:
    outcome = make_outcome(range(1, 101))

    assert outcome.percentile(50) == pytest.approx(50, rel=1e-3)
    assert outcome.percentile(99) == pytest.approx(99, rel=1e-3)
    assert outcome.max == pytest.approx(100, rel=1e-3)
    assert outcome.mean == pytest.approx(50.5, rel=1e-3)


def test_an_outcome_without_answers_has_numbers() -> None:
    outcome = make_outcome([], error=3)

    assert (outcome.rate, outcome.mean, outcome.percentile(99), outcome.failed) == (0, 0, 0, 1)


def test_histograms_add_up() -> None:
    total = merge_histograms([encode_latencies([0.0, 0.001]), encode_latencies([3600.0])])

    assert total.total_count == 3
    assert total.get_min_value() == 1
    assert total.get_max_value() == pytest.approx(MAX_MICROSECONDS, rel=1e-3)
