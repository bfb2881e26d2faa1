"""Signals to stop are counted."""

import signal

import pytest

from app.host.signals import StopSignals
from tests.fakes.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.host.signals")


@pytest.fixture
def signals(clock: Clock) -> StopSignals:  # noqa: ARG001 - it has to stand still before the first signal
    return StopSignals()


def test_no_signal_has_come_at_first(signals: StopSignals) -> None:
    assert (signals.count, signals.first) == (0, 0)


def test_the_first_signal_tells_how_to_stop(signals: StopSignals, clock: Clock) -> None:
    signals.note(signal.SIGINT)
    assert (signals.count, signals.first) == (1, signal.SIGINT)
    clock.now += 1
    signals.note(signal.SIGTERM)
    assert (signals.count, signals.first) == (2, signal.SIGINT)


def test_signals_at_once_are_one(signals: StopSignals, clock: Clock) -> None:
    for _ in range(5):
        signals.note(signal.SIGTERM)
        clock.now += 0.4
    assert signals.count == 1
    clock.now += 0.2
    signals.note(signal.SIGTERM)
    assert signals.count == 2
