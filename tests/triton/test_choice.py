"""Which of several Tritons gets the next call."""

import random
from collections import Counter
from typing import Any

import pytest

from app.triton.choice import choose
from app.triton.served_model import ServedModel
from tests.fakes.clock import Clock

_DRAWS = 2000
_NO_SERVER: Any = None


def served(clock: Clock, images: int, speed: float = 0.0) -> ServedModel:
    """Make a model with images under way, and with a speed in images per second that was measured."""
    made = ServedModel(_NO_SERVER)
    if speed:
        made.begin(1)
        began_at = clock.now
        clock.now += 1 / speed
        made.note_answer(1, began_at)
        made.calls = made.images = 0
    if images:
        made.begin(images)
    return made


def shares(candidates: list[ServedModel]) -> list[float]:
    """Return the share of the choices that each candidate gets."""
    counted = Counter(candidates.index(choose(candidates)) for _ in range(_DRAWS))
    return [counted[index] / _DRAWS for index in range(len(candidates))]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    random.seed(1)
    return Clock(monkeypatch, "app.triton.served_model")


def test_the_only_one_is_chosen(clock: Clock) -> None:
    only = served(clock, 1000)

    assert choose([only]) is only


def test_the_one_with_the_fewest_images_is_chosen(clock: Clock) -> None:
    """Of two that are as fast, or of which one has shown nothing yet."""
    assert shares([served(clock, 3), served(clock, 2)]) == [0, 1]
    assert shares([served(clock, 3, 100), served(clock, 2, 100)]) == [0, 1]
    assert shares([served(clock, 3, 1000), served(clock, 2)]) == [0, 1]


def test_a_slower_one_may_have_fewer_images(clock: Clock) -> None:
    """It gets as many images as it answers in the time that the other one needs for its own."""
    assert shares([served(clock, 9, 100), served(clock, 2, 20)]) == [1, 0]
    assert shares([served(clock, 11, 100), served(clock, 2, 20)]) == [0, 1]


def test_idle_ones_are_chosen_by_their_speed(clock: Clock) -> None:
    """The slower one is chosen sometimes; otherwise nobody would see that it has become faster."""
    assert shares([served(clock, 0, 90), served(clock, 0, 10)]) == pytest.approx([0.9, 0.1], abs=0.05)
    assert shares([served(clock, 0), served(clock, 0)]) == pytest.approx([0.5, 0.5], abs=0.05)


def test_two_are_drawn_of_many(clock: Clock) -> None:
    """The one with the most images is never chosen, the others sometimes: workers must not all choose the same one."""
    found = shares([served(clock, images) for images in (0, 1, 2, 3)])

    assert found == pytest.approx([1 / 2, 1 / 3, 1 / 6, 0], abs=0.05)
