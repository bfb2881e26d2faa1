"""Requests for one model: the limit that workers share, whose turn is next, and what a rejected caller is told."""

import asyncio
import heapq
import random
from collections.abc import Awaitable, Callable
from contextlib import suppress
from statistics import median

import pytest

from app.errors import GatewayFull
from app.resilience.batch_queue import BatchQueue
from app.resilience.concurrency import ConcurrencyLimit
from app.resilience.deadline import Deadline
from app.resilience.fairness import ANYBODY, HIGH, LOW, Caller
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.worker_table import WorkerTable
from tests.support import Clock, OpenTable

LATER = Deadline(1e9)


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Let no time pass, and have requests wait for half a minute instead of 30 ms, so that no turn comes too late by chance."""
    monkeypatch.setattr("app.resilience.model_queue._MAX_WAIT_SECONDS", 30.0)
    return Clock(monkeypatch, *(f"app.resilience.{name}" for name in ("model_queue", "rounds", "concurrency", "deadline")))


async def order_of(*admissions: tuple[str, Callable[[], Awaitable[Permit]]], permits: list[Permit]) -> str:
    """Let requests wait, then give back the permits; return the names in the order in which they are admitted, each alone."""
    order = []

    async def wait(name: str, admit: Callable[[], Awaitable[Permit]]) -> None:
        with await admit():
            order.append(name)

    waiting = [asyncio.create_task(wait(*admission)) for admission in admissions]
    await asyncio.sleep(0)
    for permit in permits:
        permit.release()
    await asyncio.gather(*waiting)
    return "".join(order)


async def test_higher_priorities_and_later_steps_come_first(table: WorkerTable) -> None:
    queue = ModelQueue(table, "tiny", 1, target_seconds=1e6)
    queue.measure(1e-6, 1, is_near=False)
    low, high = Caller("l", priority=LOW), Caller("h", priority=HIGH)
    order = await order_of(
        ("l", lambda: queue.admit(low, LATER)),
        ("a", lambda: queue.admit(Caller("a"), LATER)),
        ("s", lambda: queue.admit_later_step(Caller("s"), LATER)),
        ("h", lambda: queue.admit(high, LATER)),
        ("b", lambda: queue.admit(Caller("b"), LATER)),
        permits=[await queue.admit(Caller(name), LATER) for name in "xyz"],  # with a limit of 1, two more callers find a place
    )
    assert order == "hsabl"

    line = BatchQueue(queue, ANYBODY)
    order = await order_of(
        ("image", lambda: line.admit(LATER)),
        ("later ", lambda: line.admit(LATER, is_later_step=True)),
        permits=[await line.admit(LATER)],
    )
    assert order == "later image"


def test_rejected_requests_of_a_crowd_come_back_little_faster_than_the_model_answers(table: WorkerTable, clock: Clock) -> None:
    queue, other = ModelQueue(table, "tiny", 1, target_seconds=1e6), Caller("other")
    queue.measure(1.0, 1, is_near=False)
    told = [queue.full(ANYBODY).retry_after_seconds for _ in range(100)]
    assert (told[:3], told[32] in {11, 12}, told[-1] in {15, 16}) == ([1, 1, 1], True, True)
    assert queue.full(other).retry_after_seconds == 1
    clock.now += 30
    queue.refresh()
    assert queue.full(ANYBODY).retry_after_seconds == 1


def ask(queue: ModelQueue, caller: Caller) -> Permit | None:
    with suppress(GatewayFull):
        queue.check(caller, 0)
        return queue.try_admit(caller)
    return None


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


TARGET = 1.0
DEADLINE = 2 * TARGET


class Model:
    """A simulated model: instances that each process batches of up to so many images in a fixed time."""

    def __init__(self, instances: int, batch: int, seconds: float) -> None:
        self.seconds = seconds
        self.instances, self.batch = instances, batch
        self._starts = [-seconds] * instances
        """When the batch of each instance that was filled last starts."""
        self._images = [batch] * instances

    @property
    def speed(self) -> float:
        return self.instances * self.batch / self.seconds

    def finish(self, now: float) -> float:
        """Add one image now; return when its batch ends, or when it is dropped because that would not start in time."""
        at = min(range(self.instances), key=lambda index: self._next_start(index, now))
        start = self._next_start(at, now)
        if start - now >= DEADLINE:
            return now + DEADLINE
        self._images[at] = self._images[at] + 1 if start == self._starts[at] else 1
        self._starts[at] = start
        return start + self.seconds

    def _next_start(self, at: int, now: float) -> float:
        if self._starts[at] >= now and self._images[at] < self.batch:
            return self._starts[at]
        return max(now, self._starts[at] + self.seconds)


class Simulation:
    """Requests for a simulated model, on a simulated clock."""

    def __init__(self, clock: Clock, model: Model) -> None:
        self.clock = clock
        self.model = model
        self.limit = ConcurrencyLimit(8, 1e6, TARGET)
        self._running: list[tuple[float, float, int, bool]] = []
        """End, begin and position of each request in progress, and whether it was near the limit."""

    def run(self, seconds: float) -> list[float]:
        """Let many clients send one request after the other; return the durations of the requests that ended."""
        until = self.clock.now + seconds
        durations = []
        while self.clock.now < until:
            while len(self._running) + 1 <= max(1.0, self.limit.value):
                now, position = self.clock.now, len(self._running) + 1
                is_near = position >= 0.8 * int(self.limit.value)
                heapq.heappush(self._running, (self.model.finish(now), now, position, is_near))
            self.limit.note_reached()
            self.clock.now, began, position, is_near = heapq.heappop(self._running)
            durations.append(self.clock.now - began)
            self.limit.add(durations[-1], position, self.limit.value, is_near=is_near)
        return durations


@pytest.mark.parametrize("model", [(1, 1, 0.005), (16, 1, 0.1), (2, 16, 0.3)])
def test_limit_follows_a_model_that_becomes_slower_and_recovers(clock: Clock, model: tuple[int, int, float]) -> None:
    clock.now = 0.0  # so that times that are equal are found equal
    simulation = Simulation(clock, Model(*model))
    simulation.run(20)
    durations = simulation.run(20)
    assert len(durations) / 20 > 0.9 * simulation.model.speed
    assert median(durations) == pytest.approx(TARGET, rel=0.35)
    assert max(durations) < DEADLINE
    before = simulation.limit.value
    simulation.model.seconds *= 3
    simulation.run(60)
    assert sum(duration < DEADLINE for duration in simulation.run(20)) / 20 > 0.9 * simulation.model.speed
    assert simulation.limit.value < 0.7 * before
    simulation.model.seconds /= 3
    simulation.run(60)

    assert simulation.limit.value == pytest.approx(before, rel=0.4)
