"""Retries are few, however many requests fail."""

import pytest

from app.resilience.retry_budget import RetryBudget
from tests.fakes.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.resilience.retry_budget")


@pytest.fixture
def spent(clock: Clock) -> RetryBudget:
    """A retry budget of which nothing is left."""
    budget = RetryBudget()
    assert taken(budget) == 3
    clock.now += 0.001
    return budget


def taken(budget: RetryBudget) -> int:
    for count in range(1000):
        if not budget.take():
            return count
    raise AssertionError("there is no end to it")


@pytest.mark.parametrize(("requests", "retries"), [(0, 0), (9, 0), (10, 1), (19, 1), (25, 2)])
def test_ten_requests_earn_a_retry(spent: RetryBudget, requests: int, retries: int) -> None:
    for _ in range(requests):
        spent.note_request()

    assert taken(spent) == retries


@pytest.mark.parametrize(("seconds", "retries"), [(0, 0), (9.9, 0), (10, 1), (25, 2)])
def test_ten_seconds_earn_a_retry(spent: RetryBudget, clock: Clock, seconds: float, retries: int) -> None:
    """Requests may be so rare that they would earn none."""
    clock.now += seconds

    assert taken(spent) == retries


def test_only_a_few_retries_are_saved_up(spent: RetryBudget, clock: Clock) -> None:
    """After a quiet hour or a million requests, a failure must not begin with a burst of retries."""
    clock.now += 3600
    assert taken(spent) == 3
    for _ in range(1000):
        spent.note_request()

    assert taken(spent) == 3


def test_a_tenth_of_the_requests_is_tried_again_while_all_fail(spent: RetryBudget, clock: Clock) -> None:
    retries = 0
    for _ in range(1000):
        clock.now += 0.001
        spent.note_request()
        retries += spent.take()

    assert retries == 100
