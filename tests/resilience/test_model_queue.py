"""Requests for one model: the limit that workers share, whose turn is next, and what a rejected caller is told."""

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from itertools import cycle

import pytest

from app.errors import GatewayFull
from app.resilience.batch_queue import BatchQueue
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, HIGH, LOW, Caller, CallerCounts, FairQueue, Turn
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.worker_table import WorkerTable
from tests.fakes.clock import Clock
from tests.support import OpenTable

TARGET = 2.0
LATER = Deadline(1e9)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let no time pass, and have requests wait for half a minute instead of 30 ms, so that no turn comes too late by chance."""
    monkeypatch.setattr("app.resilience.model_queue._MAX_WAIT_SECONDS", 30.0)
    return Clock(monkeypatch, *(f"app.resilience.{name}" for name in ("model_queue", "rounds", "concurrency", "deadline")))


def open_queue(table: WorkerTable, limit: int, pace: float = 0.0) -> ModelQueue:
    """Make the queue of a model with this limit, whatever the model's speed is, and tell it the speed."""
    queue = ModelQueue(table, "tiny", limit, target_seconds=1e6)
    if pace:
        queue.measure(pace, 1, is_near=False)
    return queue


async def enter(queue: ModelQueue, *names: str, deadline: Deadline = LATER) -> list[Permit]:
    """Admit requests of callers, which are in progress until their permits are released."""
    return [await queue.admit(Caller(name), deadline) for name in names]


def leave(permits: list[Permit]) -> None:
    for permit in permits:
        permit.release()


async def order_of(*admissions: tuple[str, Callable[[], Awaitable[Permit]]], permits: list[Permit]) -> str:
    """Let requests wait, then give back the permits; return the names in the order in which they are admitted, each alone."""
    order = []

    async def wait(name: str, admit: Callable[[], Awaitable[Permit]]) -> None:
        with await admit():
            order.append(name)

    waiting = [asyncio.create_task(wait(*admission)) for admission in admissions]
    await asyncio.sleep(0)
    leave(permits)
    await asyncio.gather(*waiting)
    return "".join(order)


async def test_limit_is_the_average_of_what_workers_have_measured_lately(open_table: OpenTable, clock: Clock) -> None:
    idle, busy, new = (ModelQueue(open_table(), "tiny", 1000, TARGET) for _ in range(3))
    idle.measure(TARGET, 1, is_near=False)
    clock.now += 4
    busy.measure(TARGET / 101, 1, is_near=False)
    for seconds, limit in ((0, (1 + 101) / 2), (2, 101)):
        clock.now += seconds
        for queue in (idle, busy, new):
            queue.refresh()
        assert idle.limit == busy.limit == new.limit == pytest.approx(limit)
    idle.measure(TARGET, 1, is_near=False)
    busy.refresh()

    assert busy.limit < 101


async def test_higher_priorities_and_later_steps_come_first(table: WorkerTable) -> None:
    queue = open_queue(table, 1, pace=1e-6)
    low, high = Caller("l", priority=LOW), Caller("h", priority=HIGH)
    order = await order_of(
        ("l", lambda: queue.admit(low, LATER)),
        ("a", lambda: queue.admit(Caller("a"), LATER)),
        ("s", lambda: queue.admit_later_step(Caller("s"), LATER)),
        ("h", lambda: queue.admit(high, LATER)),
        ("b", lambda: queue.admit(Caller("b"), LATER)),
        permits=await enter(queue, *"xyz"),  # with a limit of 1, two more callers find a place
    )
    assert order == "hsabl"

    line = BatchQueue(queue, ANYBODY)
    order = await order_of(
        ("image", lambda: line.admit(LATER)),
        ("later ", lambda: line.admit(LATER, is_later_step=True)),
        permits=[await line.admit(LATER)],
    )
    assert order == "later image"


async def test_only_requests_that_come_before_it_make_a_wait_too_long(table: WorkerTable) -> None:
    queue = open_queue(table, 1, pace=10.0)
    queue.check(ANYBODY, 0)  # while none is in progress, however slow the model was
    leave(await enter(queue, "", deadline=Deadline.after(0.5)))
    permits = await enter(queue, *"xyz")
    low, high = Caller("low", priority=LOW), Caller("high", priority=HIGH)
    waiting = []
    for name in "abc":
        queue.check(low, 0)  # its turn is in 10 s, then 20, then 30, of 30
        waiting.append(asyncio.create_task(queue.admit(Caller(name, priority=LOW), LATER)))
        await asyncio.sleep(0)
    with pytest.raises(GatewayFull):
        queue.check(low, 0)
    queue.check(high, 0)
    leave(permits)
    for task in waiting:
        leave([await task])


@pytest.mark.parametrize(("pace", "least", "most"), [(0.7, 2, 3), (100.0, 30, 30)])
async def test_rejected_caller_is_told_when_to_come_back(table: WorkerTable, pace: float, least: int, most: int) -> None:
    """Not all at the same time."""
    queue = open_queue(table, 2, pace)
    permits = await enter(queue, "", "", deadline=Deadline.after(1000))
    told = set()
    for _ in range(100):
        with pytest.raises(GatewayFull) as caught:
            await enter(queue, "", deadline=Deadline.after(0.0001))
        told.add(caught.value.retry_after_seconds or 0)
    leave(permits)

    assert least <= min(told) <= max(told) <= most
    assert (len(told) > 1) is (least < most)


@pytest.mark.parametrize(("images", "ahead"), [(64, 128), (1000, 1100)])
async def test_images_of_others_that_wait_can_make_a_batch_late(table: WorkerTable, images: int, ahead: int) -> None:
    """A batch that is alone may try, because nobody is ahead of it."""
    pace = 0.001
    queue = open_queue(table, 8, pace)
    line, other = BatchQueue(queue, ANYBODY), BatchQueue(queue, Caller("other"))
    line.check(10_000, 1.0)
    permits = [await other.admit(LATER) for _ in range(4)]
    waiting = [asyncio.create_task(other.admit(LATER)) for _ in range(100)]
    await asyncio.sleep(0)
    line.check(images, 1.01 * ahead * pace)
    with pytest.raises(GatewayFull):
        line.check(images, 0.99 * ahead * pace)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)
    line.check(images, 0.99 * images * pace)
    leave(permits)


A, B = Caller("a"), Caller("b")


def take(counts: CallerCounts, limit: int, *callers: Caller) -> list[int]:
    """Let callers take one after the other, in turn, until none finds room; return what each has."""
    refused = 0
    for caller in cycle(callers):
        if counts.has_room(caller, limit, 1):
            counts.add(caller, 1)
            refused = 0
        elif (refused := refused + 1) == len(callers):
            break
    return [counts.of(caller) for caller in callers]


@pytest.mark.parametrize("limit", [1, 100])
def test_caller_alone_has_the_whole_limit_and_a_second_one_still_finds_room(open_table: OpenTable, limit: int) -> None:
    one, other = (CallerCounts(open_table(), "x") for _ in range(2))
    assert take(one, limit, A) == [limit]
    (taken,) = take(other, limit, B)
    assert taken >= limit // 10 - 1
    assert one.total == other.total == limit + taken <= 1.1 * limit + 1
    assert not one.has_room(A, limit, 1)
    one.add(A, limit)
    other.add(B, -taken)
    assert [other.has_place(caller, limit, 1) for caller in (A, B)] == [False, True]  # a first request
    other.add(B, 1)
    assert not other.has_place(B, limit, 1)
    one.add(A, -2 * limit)
    other.add(B, -1)

    assert (one.total, one.in_worker, one.of_in_worker(A)) == (0, 0, 0)
    assert take(one, limit, B) == [limit]


class Work:
    """Work that waits for its turn."""

    def __init__(self, turn: Turn) -> None:
        self.turn = turn

    @property
    def name(self) -> str:
        """The name of the caller, in capitals for images of batches."""
        return self.turn.caller.name.upper() if self.turn.is_batch else self.turn.caller.name


class Queue(FairQueue[Work]):
    def more(self, caller: Caller, number: int, cost: float = 1.0, *, is_batch: bool = False) -> list[Work]:
        added = [Work(Turn(caller, cost, is_batch)) for _ in range(number)]
        for work in added:
            self.add(work)
        return added

    def run(self, number: int) -> str:
        """Begin the next ones; return their names."""
        names = ""
        for _ in range(number):
            work = self.next()
            assert work is not None
            assert work is self.in_turn()[0]
            self.begin(work)
            names += work.name
        return names


def test_callers_take_turns_however_much_they_have() -> None:
    work = Queue()
    for dropped in work.more(B, 100):  # what is discarded costs nothing
        work.discard(dropped)
        work.discard(dropped)
    assert (len(work), work.next()) == (0, None)
    work.more(A, 100)
    assert work.run(10) == "a" * 10
    work.more(B, 100)
    assert Counter(work.run(40)) == {"a": 20, "b": 20}
    work.more(Caller("c"), 5)

    assert Counter(work.run(15)) == {"a": 5, "b": 5, "c": 5}
    assert Counter(work.run(10)) == {"a": 5, "b": 5}


@pytest.mark.parametrize(
    ("fraction", "cost", "others", "expected"),
    [(0.75, 1, 1, 30), (0.5, 1, 4, 20), (0.5, 4, 1, 8)],
)
def test_turns_are_weighed_by_share_and_cost(fraction: float, cost: float, others: int, expected: int) -> None:
    work = Queue()
    for number in range(others):
        work.more(Caller(str(number), 1 - fraction), 100)
    work.more(Caller("s", fraction, has_share=True), 100, cost)

    assert Counter(work.run(40))["s"] == pytest.approx(expected, abs=2)


def test_images_of_batches_come_behind_single_ones() -> None:
    work = Queue()
    work.more(A, 50, is_batch=True)
    work.more(A, 8)
    work.more(B, 8)
    assert Counter(work.run(18)) == {"A": 2, "a": 8, "b": 8}


def test_higher_priorities_come_first_and_lower_ones_take_turns_in_what_is_left() -> None:
    work = Queue()
    for priority in (LOW, HIGH):
        work.more(A._replace(priority=priority), 10, is_batch=True)
        work.more(B._replace(priority=priority), 2)
    work.more(Caller("n"), 2)
    assert sorted(one.name for one in work.in_turn()) == ["A"] * 10 + ["b"] * 2
    assert sorted(work.run(12)) == ["A"] * 10 + ["b"] * 2
    assert work.run(2) == "nn"
    work.more(B._replace(priority=LOW), 8)
    turns = ""
    for _ in range(10):
        work.more(Caller("h", priority=HIGH), 5)
        turns += work.run(6).removeprefix("hhhhh")
    assert Counter(turns) == {"A": 2, "b": 8}


def ask(queue: ModelQueue, caller: Caller) -> Permit | None:
    """Admit a request and return its permit; None if it is rejected."""
    try:
        queue.check(caller, 0)
    except GatewayFull:
        return None
    return queue.try_admit(caller)


def test_callers_are_admitted_equally_often(open_table: OpenTable, clock: Clock) -> None:
    """100 callers with one request at a time, two of five connected to the first worker; 50 requests a second end, in order."""
    queues = [ModelQueue(open_table(), "tiny", 10, target_seconds=1e6) for _ in range(2)]
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
