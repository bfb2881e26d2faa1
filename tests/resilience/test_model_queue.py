"""Requests for one model: how many are in progress, who waits, and who is rejected."""

import asyncio

import pytest

from app.errors import CircuitOpen, DeadlinePassed, GatewayFull
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, HIGH, LOW, Caller
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.worker_table import WorkerTable
from tests.fakes.clock import Clock
from tests.support import OpenTable

TARGET = 2.0


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


def later() -> Deadline:
    return Deadline.after(60)


async def enter(queue: ModelQueue, caller: Caller = ANYBODY, deadline: Deadline | None = None) -> Permit:
    """Admit a request, which is in progress until its permit is released."""
    permit = await queue.admit(caller, deadline or later())
    permit.__enter__()
    return permit


def leave(permit: Permit) -> None:
    permit.__exit__(None, None, None)


async def test_a_queue_that_is_full_because_triton_is_silent_says_so(table: WorkerTable) -> None:
    """A caller that is told that the gateway is full would look for the reason here."""
    queue = ModelQueue(table, "tiny", 1, 1e6, is_silent=lambda: True)
    permit = await enter(queue)
    with pytest.raises(CircuitOpen):
        queue.check(ANYBODY, 0)
    with pytest.raises(CircuitOpen):
        await enter(queue)
    leave(permit)


async def test_the_limit_is_the_average_of_what_workers_have_measured(open_table: OpenTable) -> None:
    tables = [open_table() for _ in range(3)]
    fast, slow, new = (ModelQueue(table, "tiny", 1000, TARGET) for table in tables)
    fast.measure(0.01, 1, is_near=False)
    slow.measure(0.02, 1, is_near=False)
    for queue in (fast, slow, new):
        queue.refresh()

    assert fast.limit == slow.limit == new.limit == pytest.approx((TARGET / 0.01 + TARGET / 0.02) / 2)


async def test_a_worker_that_measures_nothing_has_no_say_in_the_limit(open_table: OpenTable, clock: Clock) -> None:
    """What it found last may be long out of date; after five seconds the limit is what the others find."""
    idle, busy = (ModelQueue(open_table(), "tiny", 1000, TARGET) for _ in range(2))
    idle.measure(TARGET, 1, is_near=False)
    clock.now += 4
    busy.measure(TARGET / 101, 1, is_near=False)
    idle.refresh()
    assert busy.limit == pytest.approx((1 + 101) / 2)
    clock.now += 2
    for queue in (idle, busy):
        queue.refresh()
    assert idle.limit == busy.limit == pytest.approx(101)
    idle.measure(TARGET, 1, is_near=False)
    busy.refresh()

    assert busy.limit < 101


@pytest.mark.parametrize("pace", [0.0, 0.001, 60.0])
async def test_a_request_is_admitted_while_none_is_in_progress(table: WorkerTable, pace: float) -> None:
    """Also if the model is known to be slower than its deadline: it may have become faster."""
    queue = open_queue(table, 1, pace)
    queue.check(ANYBODY, 0)

    leave(await enter(queue, deadline=Deadline.after(0.5)))


async def test_a_changed_share_counts_at_once(table: WorkerTable) -> None:
    """The file of keys can be edited while the gateway runs."""
    queue, half = open_queue(table, 4), Caller("camera", 0.5, has_share=True)
    permits = [await enter(queue, half) for _ in range(2)]
    with pytest.raises(GatewayFull):
        queue.check(half, 0)

    queue.check(half._replace(fraction=0.75), 0)
    for permit in permits:
        leave(permit)


async def test_a_higher_priority_is_admitted_first(table: WorkerTable) -> None:
    queue = open_queue(table, 1, pace=1.0)
    permit, *others = [await enter(queue, Caller(name)) for name in "xyz"]  # with a limit of 1, two more callers find a place
    callers = [Caller("l", priority=LOW), Caller("a"), Caller("h", priority=HIGH), Caller("b")]
    waiting = {caller.name: asyncio.create_task(enter(queue, caller)) for caller in callers}
    await asyncio.sleep(0)
    order = ""
    while waiting:
        leave(permit)
        await asyncio.wait(waiting.values(), return_when=asyncio.FIRST_COMPLETED)
        (admitted,) = [name for name, task in waiting.items() if task.done()]
        permit = waiting.pop(admitted).result()
        order += admitted

    for last in (permit, *others):
        leave(last)
    assert order == "habl"


async def test_only_requests_that_come_before_it_make_a_wait_too_long(table: WorkerTable) -> None:
    queue = open_queue(table, 1, pace=10.0)
    permits = [await enter(queue, Caller(name)) for name in "xyz"]  # with a limit of 1, two more callers find a place
    waiting = [asyncio.create_task(enter(queue, Caller(name, priority=LOW))) for name in "ab"]
    await asyncio.sleep(0)
    queue.check(Caller("high", priority=HIGH), 0)  # its turn is in 10 s, of 30 s
    queue.check(Caller("low", priority=LOW), 0)  # in 30 s
    waiting.append(asyncio.create_task(enter(queue, Caller("c", priority=LOW))))
    await asyncio.sleep(0)

    with pytest.raises(GatewayFull):
        queue.check(Caller("low", priority=LOW), 0)
    queue.check(Caller("high", priority=HIGH), 0)
    for permit in permits:
        leave(permit)
    for task in waiting:
        leave(await task)


@pytest.mark.parametrize(
    ("pace", "least", "most"), [(0.0, 1, 1), (0.001, 1, 1), (0.7, 2, 3), (1.5, 4, 6), (10.0, 21, 30), (100.0, 30, 30)]
)
async def test_a_rejected_caller_is_told_when_to_come_back(table: WorkerTable, pace: float, least: int, most: int) -> None:
    queue = open_queue(table, 2, pace)
    permits = [await enter(queue, deadline=Deadline.after(1000)) for _ in range(2)]
    told = []
    for _ in range(100):
        with pytest.raises(GatewayFull) as caught:
            await enter(queue, deadline=Deadline.after(0.0001))
        told.append(caught.value.retry_after_seconds or 0)

    assert least <= min(told) <= max(told) <= most
    assert (len(set(told)) > 1) is (least < most)
    for permit in permits:
        leave(permit)


@pytest.mark.parametrize(("seconds", "is_admitted"), [(1.0, False), (1.9 * TARGET - 0.1, False), (1.9 * TARGET + 0.1, True)])
async def test_only_short_deadlines_are_compared_with_the_predicted_wait(
    table: WorkerTable,
    seconds: float,
    is_admitted: bool,  # noqa: FBT001
) -> None:
    """For the usual deadline the limit is enough: requests of a batch take as long together as one alone."""
    queue = ModelQueue(table, "tiny", 10, TARGET)
    for measured in (TARGET / 10, *[0.9 * TARGET] * 100):  # the limit is 10, then requests take longer
        queue.measure(measured, 1, is_near=False)
    permits = [await enter(queue) for _ in range(2)]
    if is_admitted:
        permits.append(await enter(queue, deadline=Deadline.after(seconds)))
    else:
        with pytest.raises(GatewayFull):
            await enter(queue, deadline=Deadline.after(seconds))

    for permit in permits:
        leave(permit)


async def test_a_request_is_measured_when_its_result_is_there(table: WorkerTable, clock: Clock) -> None:
    """The first one gives the limit for the next ones; one that failed would say nothing about the model."""
    queue = ModelQueue(table, "tiny", 1000, TARGET)
    before = queue.limit
    failed = await enter(queue)
    clock.now += 0.001
    leave(failed)
    assert queue.limit == before
    permit = await enter(queue)
    clock.now += 0.1
    permit.measure()
    leave(permit)

    assert queue.limit == pytest.approx(TARGET / 0.1)


async def test_a_caller_with_few_requests_is_not_measured(table: WorkerTable, clock: Clock) -> None:
    """They do not wait behind those of the others, which would seem to be as fast."""
    queue = ModelQueue(table, "tiny", 1000, TARGET)
    *many, few = [await enter(queue, Caller(name)) for name in "cbbbbba"]
    clock.now += 0.1
    few.measure()
    assert queue.pace() == pytest.approx(0.1 / 7)  # better than nothing
    clock.now += 0.3
    for permit in many:
        permit.measure()
    slow = queue.pace()
    few.measure()
    assert queue.pace() == slow
    assert slow > 0.1
    for permit in (few, *many):
        leave(permit)

    equal = [await enter(queue, Caller(name)) for name in "abcd"]
    clock.now += 0.1
    for permit in equal:
        permit.measure()
        leave(permit)
    assert queue.pace() < slow


async def test_later_steps_come_before_new_requests_of_their_priority(table: WorkerTable) -> None:
    queue = open_queue(table, 1, pace=1e-6)
    permit = await enter(queue)
    order = []

    async def wait(name: str, caller: Caller, *, is_later_step: bool = False) -> None:
        with await (queue.admit_later_step if is_later_step else queue.admit)(caller, later()):
            order.append(name)

    waiting = [
        asyncio.create_task(wait("new", ANYBODY)),
        asyncio.create_task(wait("later", ANYBODY, is_later_step=True)),
        asyncio.create_task(wait("high", ANYBODY._replace(priority=HIGH))),
    ]
    await asyncio.sleep(0)
    leave(permit)
    await asyncio.gather(*waiting)
    assert order == ["high", "later", "new"]


async def test_a_later_step_does_not_wait_behind_those_of_another_caller(table: WorkerTable) -> None:
    queue, many, few = open_queue(table, 2), Caller("many"), Caller("few")
    permits = [await enter(queue, many) for _ in range(2)]
    waiting = asyncio.create_task(queue.admit_later_step(many, later()))
    await asyncio.sleep(0)
    entering = asyncio.create_task(queue.admit_later_step(few, later()))
    await asyncio.sleep(0)
    assert (entering.done(), waiting.done()) == (True, False)
    with await entering:
        pass
    for permit in permits:
        leave(permit)
    with await waiting:
        pass


async def test_a_later_step_waits_until_its_deadline(table: WorkerTable) -> None:
    queue = open_queue(table, 1)
    permit = await enter(queue)
    with pytest.raises(DeadlinePassed):
        await queue.admit_later_step(ANYBODY, Deadline.after(0))
    leave(permit)
    leave(await enter(queue))
