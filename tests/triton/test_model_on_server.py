"""The state of a model on one Triton, as derived from its calls."""

from types import SimpleNamespace
from typing import Any

import pytest

from app.triton.model_on_server import InFlightCall, ModelOnServer
from tests.fakes.clock import Clock

_NO_SERVER: Any = None
HANG_SECONDS = 5.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.triton.model_on_server")


@pytest.fixture
def served(clock: Clock) -> ModelOnServer:
    assert clock.now
    return ModelOnServer(_NO_SERVER)


def answer(served: ModelOnServer, clock: Clock, seconds: float, images: int = 1, *, fails: bool = False) -> None:
    """Simulate a call that takes this long."""
    in_flight = InFlightCall(served, images)
    clock.now += seconds
    served.note_answer(0 if fails else images, in_flight.began_at)
    in_flight.end()


def test_the_speed_is_that_while_calls_are_under_way(served: ModelOnServer, clock: Clock) -> None:
    assert served.speed == 0
    for _ in range(3):
        answer(served, clock, 0.1, images=4)
        clock.now += 60

    assert served.speed == pytest.approx(40)


def test_calls_at_the_same_time_add_to_the_speed(served: ModelOnServer, clock: Clock) -> None:
    places = [InFlightCall(served, 1) for _ in range(2)]
    clock.now += 0.1
    for in_flight in places:
        served.note_answer(1, in_flight.began_at)
        in_flight.end()

    assert served.speed == pytest.approx(20, rel=0.1)


def test_the_speed_follows_the_latest_calls(served: ModelOnServer, clock: Clock) -> None:
    for _ in range(100):
        answer(served, clock, 0.01)
    assert served.speed == pytest.approx(100)
    for _ in range(5):
        answer(served, clock, 0.1)

    assert served.speed < 25


def test_triton_that_fails_at_once_is_not_fast(served: ModelOnServer, clock: Clock) -> None:
    """Otherwise a failing Triton would get all calls."""
    answer(served, clock, 0.001, fails=True)
    assert 0 < served.speed < 2
    answer(served, clock, 0.1)
    before = served.speed
    for _ in range(10):
        answer(served, clock, 0.001, fails=True)

    assert served.speed < before


def test_calls_from_before_a_pause_say_nothing(served: ModelOnServer, clock: Clock) -> None:
    """Such calls end when a stopped Triton continues, and do not show its speed."""
    in_flight = InFlightCall(served, 1)
    clock.now += 60
    served.forget_speed()
    served.note_answer(1, in_flight.began_at)
    assert served.speed == 0
    in_flight.end()
    answer(served, clock, 0.1)

    assert served.speed == pytest.approx(10)


def test_calls_that_end_after_a_hang_do_not_make_others_late(served: ModelOnServer, clock: Clock) -> None:
    hung = [InFlightCall(served, 1) for _ in range(2)]
    clock.now += 12
    circuit: Any = SimpleNamespace(is_closed=False)
    served.circuit = circuit
    for in_flight in hung:
        served.note_answer(1, in_flight.began_at)
        in_flight.end()
    circuit.is_closed = True
    InFlightCall(served, 1)

    assert served.may_answer_within(0.6)


def test_a_call_that_moves_counts_at_the_other_triton(served: ModelOnServer, clock: Clock) -> None:
    other = ModelOnServer(_NO_SERVER)
    in_flight = InFlightCall(served, 3)
    in_flight.reads_slot = True
    clock.now += 1
    in_flight.move(other)

    assert (served.calls, served.images, other.calls, other.images) == (0, 0, 1, 3)
    assert (in_flight.served, in_flight.reads_slot, in_flight.began_at) == (other, False, clock.now)


def test_triton_without_calls_is_not_silent(served: ModelOnServer, clock: Clock) -> None:
    answer(served, clock, 0.1)
    clock.now += 3600

    assert not served.is_silent(HANG_SECONDS)


@pytest.mark.parametrize(
    ("call_seconds", "images", "silent_after"),
    [
        (0.001, 1, 0.5),  # a fast Triton may pause
        (0.4, 1, 0.8),
        (0.1, 10, 2.0),  # ten images take ten times as long
        (0.1, 1000, 2.5),  # at most half of `HANG_SECONDS`
        (4.0, 1, 6.0),  # unless each call takes longer
    ],
)
def test_triton_is_silent_when_a_call_takes_much_longer_than_usual(
    served: ModelOnServer, clock: Clock, call_seconds: float, images: int, silent_after: float
) -> None:
    answer(served, clock, call_seconds)
    served.begin(images)
    clock.now += silent_after - 0.01
    assert not served.is_silent(HANG_SECONDS)
    clock.now += 0.02

    assert served.is_silent(HANG_SECONDS)


def test_triton_that_never_answered_is_silent_after_half_of_the_time_of_a_hang(served: ModelOnServer, clock: Clock) -> None:
    served.begin(1)
    clock.now += 2.4
    assert not served.is_silent(HANG_SECONDS)
    clock.now += 0.2

    assert served.is_silent(HANG_SECONDS)


def test_slow_triton_that_was_left_out_may_be_as_slow_again(served: ModelOnServer, clock: Clock) -> None:
    answer(served, clock, 4.0)
    served.forget_speed()
    served.begin(1)
    clock.now += 5.9
    assert not served.is_silent(HANG_SECONDS)
    clock.now += 0.2

    assert served.is_silent(HANG_SECONDS)
