"""Deadlines on a clock that the test sets."""

import time

import pytest

from app.resilience.deadline import Deadline
from tests.fakes.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.resilience.deadline")


def test_deadline_lies_ahead_by_the_given_seconds(clock: Clock) -> None:
    deadline = Deadline.after(2.5)
    clock.now += 1

    assert deadline == Deadline(1002.5)
    assert deadline.remaining == 1.5


def test_remaining_time_decreases(clock: Clock) -> None:
    """The remaining time decreases as time passes, and is negative once the deadline has passed."""
    deadline = Deadline.after(2)

    remaining = []
    for _ in range(3):
        remaining.append(deadline.remaining)
        clock.now += 1.5

    assert remaining == [2.0, 0.5, -1.0]


def test_deadline_of_no_seconds_has_passed(clock: Clock) -> None:
    deadline = Deadline.after(0)
    clock.now += 0.001

    assert deadline.remaining < 0


def test_wall_clock_does_not_matter(monkeypatch: pytest.MonkeyPatch) -> None:
    """A deadline is set on the monotonic clock, so that setting the time of day neither extends nor shortens it."""
    before = time.monotonic()
    deadline = Deadline.after(100)
    monkeypatch.setattr("time.time", lambda: 0.0)
    monkeypatch.setattr("time.time_ns", lambda: 0)

    assert before + 100 <= deadline.at <= time.monotonic() + 100
    assert 90 < deadline.remaining <= 100
