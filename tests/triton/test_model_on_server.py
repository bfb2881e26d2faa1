"""The state of a Triton and of a model on it, as derived from calls."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from app.triton.model_on_server import InFlightCall, ModelOnServer
from app.triton.silence import Silence
from tests.fakes.clock import Clock
from tests.support import TABLE

_NO_SERVER: Any = None
HANG_SECONDS = 5.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.triton.model_on_server", "app.triton.silence")


@pytest.fixture
def served(clock: Clock) -> ModelOnServer:
    assert clock.now
    return ModelOnServer(_NO_SERVER)


def answer(served: ModelOnServer, clock: Clock, seconds: float, *answers: int) -> None:
    """Simulate calls that take this long, each with so many images; 0 for one that fails."""
    in_flight = [(InFlightCall(served, images or 1), images) for images in answers or (1,)]
    clock.now += seconds
    for call, images in in_flight:
        served.note_answer(images, call.began_at)
        call.end()


def test_speed_is_that_while_calls_are_under_way(served: ModelOnServer, clock: Clock) -> None:
    assert served.speed == 0
    for _ in range(3):
        answer(served, clock, 0.1, 4)
        clock.now += 60
    assert served.speed == pytest.approx(40)
    served.forget_speed()
    answer(served, clock, 0.1, 1, 1)
    assert served.speed == pytest.approx(20, rel=0.1)
    for _ in range(100):
        answer(served, clock, 0.01)
    for _ in range(5):  # the latest calls count most
        answer(served, clock, 0.1)
    assert served.speed < 25


def test_triton_that_fails_at_once_is_not_fast(served: ModelOnServer, clock: Clock) -> None:
    """Otherwise a failing Triton would get all calls."""
    answer(served, clock, 0.001, 0)
    assert 0 < served.speed < 2
    answer(served, clock, 0.1)
    before = served.speed
    for _ in range(10):
        answer(served, clock, 0.001, 0)

    assert served.speed < before


def test_calls_from_before_a_pause_say_nothing(served: ModelOnServer, clock: Clock) -> None:
    """Such calls end when a stopped Triton continues, and neither show its speed nor make others late."""
    hung = [InFlightCall(served, 1) for _ in range(2)]
    clock.now += 12
    circuit: Any = SimpleNamespace(is_closed=False)
    served.circuit = circuit
    served.note_answer(1, hung[0].began_at)
    served.forget_speed()
    served.note_answer(1, hung[1].began_at)
    assert served.speed == 0
    for call in hung:
        call.end()
    circuit.is_closed = True
    InFlightCall(served, 1)

    assert served.may_answer_within(0.6)


def test_call_that_moves_counts_at_the_other_triton(served: ModelOnServer, clock: Clock) -> None:
    other = ModelOnServer(_NO_SERVER)
    in_flight = InFlightCall(served, 3)
    in_flight.reads_slot = True
    clock.now += 1
    in_flight.move(other)

    assert (served.calls, served.images, other.calls, other.images) == (0, 0, 1, 3)
    assert (in_flight.served, in_flight.reads_slot, in_flight.began_at) == (other, False, clock.now)


@pytest.mark.parametrize(
    ("call_seconds", "images", "silent_after"),
    [
        (0.001, 1, 0.5),  # a fast Triton may pause
        (0.4, 1, 0.8),
        (0.1, 10, 2.0),  # ten images take ten times as long
        (0.1, 1000, 2.5),  # at most half of `HANG_SECONDS`
        (4.0, 1, 6.0),  # unless each call takes longer; also after it was left out
        (0, 1, 2.5),  # it never answered
    ],
)
def test_triton_is_silent_when_a_call_takes_much_longer_than_usual(
    served: ModelOnServer, clock: Clock, call_seconds: float, images: int, silent_after: float
) -> None:
    if call_seconds:
        answer(served, clock, call_seconds)
    if call_seconds == 4:
        served.forget_speed()
    assert not served.is_silent(HANG_SECONDS)
    served.begin(images)
    clock.now += silent_after - 0.01
    assert not served.is_silent(HANG_SECONDS)
    clock.now += 0.02

    assert served.is_silent(HANG_SECONDS)


class Client:
    """Answers once it may."""

    address = "silent:8001"

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()

    async def read_server(self) -> None:
        await self.may_answer.wait()


@pytest.mark.parametrize(
    ("answered_after", "pause", "missed_after", "is_silent"),
    [
        (0.01, 0, 0.35, True),  # a deadline of 0.6 s, asked after 0.25 s
        (0.5, 0, 0.9, False),  # its CPU is used by others
        (0.5, 0, 1.1, True),
        (0.5, 11, 0.35, True),  # it was, but not lately
        (12, 0, 0.35, True),  # it was stopped, not slow
    ],
)
async def test_triton_is_silent_soon_unless_it_was_slow_lately(
    clock: Clock, answered_after: float, pause: float, missed_after: float, *, is_silent: bool
) -> None:
    """A missed deadline is counted in any case, so that nobody is told that the gateway is full."""
    client: Any = Client()
    silence = Silence(client, TABLE)
    silence.ask(clock.now, lambda: None)
    clock.now += answered_after
    client.may_answer.set()
    await asyncio.sleep(0)
    client.may_answer.clear()
    clock.now += pause

    silence.ask(clock.now, lambda: None)
    await asyncio.sleep(0)
    clock.now += missed_after
    assert silence.note_missed() is is_silent
    assert silence.missed == 1
    await silence.stop()
    assert silence.missed == 0
