"""Requests for one model: the limit that workers share, whose turn is next, and what a rejected caller is told."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from app.errors import DeadlinePassed, GatewayFull
from app.resilience.batch_queue import BatchQueue
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, HIGH, LOW, Caller
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
    return Clock(monkeypatch, *(f"app.resilience.{name}" for name in ("model_queue", "concurrency", "deadline")))


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


async def test_changed_share_counts_at_once(table: WorkerTable) -> None:
    """The file of keys can be edited while the gateway runs."""
    queue, half = open_queue(table, 4), Caller("camera", 0.5, has_share=True)
    permits = [await queue.admit(half, LATER) for _ in range(2)]
    with pytest.raises(GatewayFull):
        queue.check(half, 0)

    queue.check(half._replace(fraction=0.75), 0)
    leave(permits)


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


async def test_later_step_waits_until_its_deadline_but_not_behind_those_of_another_caller(table: WorkerTable) -> None:
    queue, many = open_queue(table, 2), Caller("many")
    permits = await enter(queue, "many", "many")
    with pytest.raises(DeadlinePassed):
        await queue.admit_later_step(many, Deadline.after(0))
    waiting = asyncio.create_task(queue.admit_later_step(many, LATER))
    await asyncio.sleep(0)
    leave([await queue.admit_later_step(Caller("few"), LATER)])
    assert not waiting.done()
    leave(permits)
    leave([await waiting])


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


@pytest.mark.parametrize(("pace", "least", "most"), [(0.0, 1, 1), (0.7, 2, 3), (10.0, 21, 30), (100.0, 30, 30)])
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


@pytest.mark.parametrize(("seconds", "is_admitted"), [(1.9 * TARGET - 0.1, False), (1.9 * TARGET + 0.1, True)])
async def test_only_short_deadlines_are_compared_with_the_predicted_wait(
    table: WorkerTable, seconds: float, *, is_admitted: bool
) -> None:
    """For the usual deadline the limit is enough: requests of a batch take as long together as one alone."""
    queue = ModelQueue(table, "tiny", 10, TARGET)
    for measured in (TARGET / 10, *[0.9 * TARGET] * 100):  # the limit is 10, then requests take longer
        queue.measure(measured, 1, is_near=False)
    permits = await enter(queue, "", "")
    if is_admitted:
        permits += await enter(queue, "", deadline=Deadline.after(seconds))
    else:
        with pytest.raises(GatewayFull):
            await enter(queue, "", deadline=Deadline.after(seconds))
    leave(permits)


async def test_caller_with_few_requests_is_not_measured(table: WorkerTable, clock: Clock) -> None:
    """They do not wait behind those of the others, which would seem to be as fast."""
    queue = ModelQueue(table, "tiny", 1000, TARGET)
    *many, few = await enter(queue, *"cbbbbba")
    clock.now += 0.1
    few.measure()
    assert queue.pace() == pytest.approx(0.1 / 7)  # better than nothing
    clock.now += 0.3
    for permit in many:
        permit.measure()
    slow = queue.pace()
    few.measure()
    assert queue.pace() == slow > 0.1
    leave([few, *many])

    equal = await enter(queue, *"abcd")
    clock.now += 0.1
    for permit in equal:
        permit.measure()
    leave(equal)
    assert queue.pace() < slow


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
