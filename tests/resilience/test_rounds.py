"""With more callers than places, each is admitted equally often, whatever worker it is connected to."""

import random

import pytest

from app.errors import GatewayFull
from app.resilience.fairness import Caller
from app.resilience.model_queue import ModelQueue, Permit
from tests.fakes.clock import Clock
from tests.support import OpenTable

PLACES = 10


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
    permit = queue.try_admit(caller)
    return None if permit is None else permit.__enter__()


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
            permit.__exit__(None, None, None)
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
        permit.__exit__(None, None, None)

    assert sum(admitted.values()) >= 4_800  # no place was kept free for long
    assert rejected > 5_000
    assert max(admitted.values()) - min(admitted.values()) <= 6  # of about 50


def test_a_place_is_not_kept_for_callers_that_do_not_come_back(queues: list[ModelQueue], clock: Clock) -> None:
    queue, callers = queues[0], [Caller(f"caller {number}") for number in range(4 * PLACES)]
    working = [permit for caller in callers if (permit := ask(queue, caller))]
    for permit in working:
        permit.__exit__(None, None, None)
    last = callers[-1]
    again = [ask(queue, last)]
    assert ask(queue, last) is None  # behind the others
    clock.now += 0.2
    again.append(ask(queue, last))

    for taken in again:
        assert taken is not None
        taken.__exit__(None, None, None)


def test_callers_that_have_left_another_worker_are_forgotten(queues: list[ModelQueue], clock: Clock) -> None:
    """Although nobody asks that worker any more."""
    left, queue = queues
    crowd = [permit for number in range(4 * PLACES) if (permit := ask(left, Caller(f"caller {number}")))]
    for permit in crowd:
        permit.__exit__(None, None, None)
    clock.now += 60
    left.refresh()

    caller = Caller("last")
    for _ in range(2):
        working = [ask(queue, caller) for _ in range(PLACES)]
        assert ask(queue, caller) is None  # no place
        for taken in working:
            assert taken is not None
            taken.__exit__(None, None, None)


@pytest.mark.usefixtures("clock")
def test_no_place_is_kept_when_all_rejected_callers_have_come_back(queues: list[ModelQueue]) -> None:
    queue, callers = queues[0], [Caller(f"caller {number}") for number in range(4 * PLACES)]
    for caller in _rejected(queue, callers):
        _serve(queue, caller)

    for _ in range(3):
        _serve(queue, callers[-1])


def test_rejections_of_a_caller_with_a_share_keep_no_place(queues: list[ModelQueue], clock: Clock) -> None:
    queue, callers = queues[0], [Caller(f"caller {number}", 0.5) for number in range(4 * PLACES)]
    _rejected(queue, callers)
    clock.now += 0.2
    owner = Caller("owner", 0.5, has_share=True)
    working = [permit for _ in range(2 * PLACES) if (permit := ask(queue, owner))]
    assert len(working) < 2 * PLACES

    for _ in range(3):
        _serve(queue, callers[-1])
    for permit in working:
        permit.__exit__(None, None, None)


def _rejected(queue: ModelQueue, callers: list[Caller]) -> list[Caller]:
    """Let all callers ask while no request ends; return those that were rejected."""
    permits = {caller: ask(queue, caller) for caller in callers}
    for permit in permits.values():
        if permit is not None:
            permit.__exit__(None, None, None)
    return [caller for caller, permit in permits.items() if permit is None]


def _serve(queue: ModelQueue, caller: Caller) -> None:
    permit = ask(queue, caller)
    assert permit is not None
    permit.__exit__(None, None, None)
