"""Deadlines on a clock that the test sets."""

import pytest

from app.resilience.deadline import Deadline
from tests.fakes.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.resilience.deadline")


def test_remaining_time_decreases(clock: Clock) -> None:
    deadline = Deadline.after(2)

    remaining = []
    for _ in range(3):
        remaining.append(deadline.remaining)
        clock.now += 1.5

    assert remaining == [2.0, 0.5, -1.0]
