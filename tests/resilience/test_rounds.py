"""With more callers than places, each is admitted equally often, whatever worker it is connected to."""

import random

import pytest

from app.errors import GatewayFull
from app.resilience.fairness import Caller
from app.resilience.model_queue import ModelQueue, Permit
from tests.fakes.clock import Clock
from tests.support import OpenTable

PLACES = 10
CALLERS = [Caller(f"caller {number}") for number in range(4 * PLACES)]
LAST = CALLERS[-1]


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    return Clock(monkeypatch, "app.resilience.model_queue", "app.resilience.rounds")


@pytest.fixture
def queues(open_table: OpenTable) -> list[ModelQueue]:
    """The queues of two workers for one model."""
    return [ModelQueue(open_table(), "tiny", PLACES, target_seconds=1e6) for _ in range(2)]


def ask(queue: ModelQueue, caller: Caller) -> Permit | None:
    """Admit a request and return its permit; None if it is rejected."""
    try:
        queue.check(caller, 0)
    except GatewayFull:
        return None
    return queue.try_admit(caller)


def ask_all(queue: ModelQueue, *callers: Caller) -> list[Caller]:
    """Let callers ask while no request ends; return those that were rejected."""
    permits = {caller: ask(queue, caller) for caller in callers}
    for permit in permits.values():
        if permit is not None:
            permit.release()
    return [caller for caller, permit in permits.items() if permit is None]


def test_callers_are_admitted_equally_often(queues: list[ModelQueue], clock: Clock) -> None:
    """100 callers with one request at a time, two of five connected to the first worker; 50 requests a second end, in order."""
    chance = random.Random(1)  # noqa: S311 - reproducible
    callers = [Caller(f"caller {number}") for number in range(100)]
    admitted = dict.fromkeys(callers, 0)
    due = {caller: chance.random() for caller in callers}
    working: list[tuple[Caller, Permit]] = []
    rejected = 0
    for _ in range(5_000):
        clock.now += 0.02
        if working:
            caller, permit = working.pop(0)
            permit.release()
            due[caller] = clock.now
        for number in sorted(range(100), key=lambda number: due[callers[number]]):
            caller = callers[number]
            if due[caller] > clock.now:
                break
            new = ask(queues[number % 5 < 3], caller)
            if new is not None:
                admitted[caller] += 1
                working.append((caller, new))
                due[caller] = float("inf")
            else:
                rejected += 1
                due[caller] = clock.now + chance.uniform(0.5, 1)
    for _, permit in working:
        permit.release()

    assert sum(admitted.values()) >= 4_800  # no place was kept free for long
    assert rejected > 5_000
    assert max(admitted.values()) - min(admitted.values()) <= 6  # of about 50


def test_place_is_kept_for_a_moment_until_rejected_callers_have_come_back(queues: list[ModelQueue], clock: Clock) -> None:
    queue = queues[0]
    rejected = ask_all(queue, *CALLERS)
    assert ask_all(queue, LAST) == []
    assert ask_all(queue, LAST) == [LAST]  # behind the others
    clock.now += 0.2
    assert ask_all(queue, LAST) == []

    rejected += ask_all(queue, *CALLERS)
    for caller in rejected:
        ask_all(queue, caller)
    for _ in range(3):
        assert ask_all(queue, LAST) == []


def test_callers_that_have_left_another_worker_are_forgotten(queues: list[ModelQueue], clock: Clock) -> None:
    """Although nobody asks that worker any more."""
    left, queue = queues
    assert ask_all(left, *CALLERS)
    clock.now += 60
    left.refresh()

    for _ in range(2):
        working = [permit for _ in range(PLACES) if (permit := ask(queue, LAST))]
        assert len(working) == PLACES
        assert ask(queue, LAST) is None  # no place
        for permit in working:
            permit.release()


def test_rejections_of_a_caller_with_a_share_keep_no_place(queues: list[ModelQueue], clock: Clock) -> None:
    queue, owner = queues[0], Caller("owner", 0.5, has_share=True)
    *_, last = callers = [caller._replace(fraction=0.5) for caller in CALLERS]
    ask_all(queue, *callers)
    clock.now += 0.2
    working = [permit for _ in range(2 * PLACES) if (permit := ask(queue, owner))]
    assert len(working) < 2 * PLACES

    for _ in range(3):
        assert ask_all(queue, last) == []
    for permit in working:
        permit.release()
