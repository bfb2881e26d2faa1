"""Events are spaced out in time."""

import pytest

from app.resilience.pacer import Pacer
from tests.fakes.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.resilience.pacer")


def test_rare_events_do_not_wait(clock: Clock) -> None:
    """The budget of three seconds may be used at once."""
    paced = Pacer(10)
    for _ in range(3):
        assert [paced.wait() for _ in range(30)] == pytest.approx([0] * 30, abs=1e-9)
        clock.now += 3


def test_more_events_wait_in_turn(clock: Clock) -> None:
    """Each event waits a tenth of a second longer than the one before."""
    paced = Pacer(10)
    for _ in range(30):
        paced.wait()

    assert [paced.wait() for _ in range(3)] == pytest.approx([0.1, 0.2, 0.3])
    clock.now += 0.2
    assert paced.wait() == pytest.approx(0.2)


@pytest.mark.parametrize("limit", [1, 2])
def test_no_event_waits_longer_than_a_limit(clock: Clock, limit: float) -> None:
    """However many there are; the waiting ends soon after they have become rare."""
    paced = Pacer(10, limit)
    assert max(paced.wait() for _ in range(1000)) == pytest.approx(limit)
    clock.now += limit + 0.2

    assert paced.wait() == 0
