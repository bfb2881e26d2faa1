"""Blocking work runs in a few threads, in the turn of its caller, and under the deadline of its request."""

import asyncio
import os
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from app.errors import DeadlinePassed
from app.pipeline.decode_threads import DecodeThreads
from app.resilience.deadline import Deadline
from app.resilience.fairness import SHADOW, Caller, Turn
from app.resilience.lease import Lease
from tests.processes import PATIENCE_SECONDS
from tests.support import eventually


def later() -> Deadline:
    return Deadline.after(30)


class Gate:
    def __init__(self) -> None:
        self.has_started = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> str:
        self.has_started.set()
        self.may_end.wait(PATIENCE_SECONDS)
        return "done"


@pytest.fixture
def pool() -> Iterator[DecodeThreads]:
    made = DecodeThreads(1)
    yield made
    made.close()


@pytest.fixture
def gate() -> Iterator[Gate]:
    made = Gate()
    yield made
    made.may_end.set()


async def test_jobs_start_in_order_of_arrival(pool: DecodeThreads, gate: Gate) -> None:
    order: list[int] = []
    blocking = asyncio.ensure_future(pool.run(gate, later(), Lease(), turn=Turn(A)))
    waiting = [asyncio.ensure_future(pool.run(lambda n=n: order.append(n), later(), Lease(), turn=Turn(A))) for n in range(5)]  # type: ignore[misc]
    await eventually(gate.has_started.is_set)
    assert order == []
    gate.may_end.set()
    await asyncio.gather(blocking, *waiting)

    assert order == list(range(5))


@pytest.mark.parametrize("threads", [1, 3])
async def test_only_so_many_jobs_run_at_a_time(threads: int) -> None:
    pool, gates = DecodeThreads(threads), [Gate() for _ in range(5)]
    running = [asyncio.ensure_future(pool.run(gate, later(), Lease(), turn=Turn(A))) for gate in gates]
    for ended, gate in enumerate(gates):
        started = min(threads + ended, 5)
        await eventually(lambda started=started: sum(gate.has_started.is_set() for gate in gates) == started)  # type: ignore[misc]
        gate.may_end.set()

    assert await asyncio.gather(*running) == ["done"] * 5
    pool.close()


class Image: ...


@pytest.mark.parametrize("is_late", [False, True])
async def test_a_queued_job_that_is_dropped_frees_what_it_refers_to(pool: DecodeThreads, gate: Gate, *, is_late: bool) -> None:
    """The image of a request that has left or missed its deadline does not stay in memory until a thread is free."""
    deadline: Any = SimpleNamespace(remaining=0.001 if is_late else 30)
    blocking = asyncio.ensure_future(pool.run(gate, later(), Lease(), turn=Turn(A)))
    await eventually(gate.has_started.is_set)
    image = Image()
    left = weakref.ref(image)
    asking = asyncio.ensure_future(pool.run(partial(id, image), deadline, Lease(), turn=Turn(A)))
    await asyncio.sleep(0)
    del image
    assert (left() is not None, pool.waiting) == (True, 1)
    if not is_late:
        asking.cancel()
    with pytest.raises(DeadlinePassed if is_late else asyncio.CancelledError):
        await asking
    del asking
    assert (left(), pool.waiting) == (None, 0)
    gate.may_end.set()

    assert await blocking == "done"


async def test_a_job_whose_deadline_has_passed_does_not_run_on_an_idle_pool(pool: DecodeThreads) -> None:
    """An idle thread could start it before the event loop notices the missed deadline."""
    ran: list[bool] = []
    for _ in range(100):
        with pytest.raises(DeadlinePassed, match="took too long"):
            await pool.run(lambda: ran.append(True), Deadline.after(-1), Lease(), turn=Turn(A))
    await pool.run(lambda: None, later(), Lease(), turn=Turn(A))

    assert ran == []


async def test_a_job_that_has_ended_keeps_nothing(pool: DecodeThreads) -> None:
    released: list[bool] = []
    with Lease() as lease:
        lease.on_release(lambda: released.append(True))
        assert await pool.run(lambda: 7, later(), lease, turn=Turn(A)) == 7
        assert released == []

    assert released == [True]


async def test_closing_waits_for_running_jobs_and_drops_the_others(gate: Gate) -> None:
    """The memory that a thread writes to must exist until the thread has ended."""
    pool = DecodeThreads(1)
    ran: list[bool] = []
    running = asyncio.ensure_future(pool.run(gate, later(), Lease(), turn=Turn(A)))
    waiting = asyncio.ensure_future(pool.run(lambda: ran.append(True), later(), Lease(), turn=Turn(A)))
    await eventually(gate.has_started.is_set)
    threading.Timer(0.1, gate.may_end.set).start()
    pool.close()

    assert gate.may_end.is_set()
    assert await running == "done"
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ran == []


A, B = Caller("a"), Caller("b")
LARGE = 1e6
"""Pixels of an image that is decoded in another thread."""


class Jobs:
    """Large images of callers in a pool of one thread for them, which is busy with one of A."""

    def __init__(self, pool: DecodeThreads, gate: Gate) -> None:
        self._pool = pool
        self._gate = gate
        self.order: list[str] = []
        """What has run."""
        self._tasks: list[asyncio.Future[Any]] = [asyncio.ensure_future(pool.run(gate, later(), turn=Turn(A, LARGE)))]

    def add(self, number: int, caller: Caller, name: str, *, cost: float, is_batch: bool = False) -> None:
        for _ in range(number):
            turn = Turn(caller, cost, is_batch)
            self._tasks.append(asyncio.ensure_future(self._pool.run(partial(self._note, name), later(), turn=turn)))

    def _note(self, name: str) -> None:
        self.order.append(name)

    async def finish(self) -> None:
        self._gate.may_end.set()
        await asyncio.gather(*self._tasks)


@pytest.fixture
async def jobs(pool: DecodeThreads, gate: Gate) -> Jobs:
    made = Jobs(pool, gate)
    await eventually(gate.has_started.is_set)
    return made


@pytest.mark.usefixtures("jobs")
async def test_other_jobs_do_not_wait_for_large_images(pool: DecodeThreads, gate: Gate) -> None:
    """Those are decoded in threads of their own, whose priority is lower."""
    read_niceness = partial(os.getpriority, os.PRIO_PROCESS, 0)
    usual = await pool.run(read_niceness, later(), turn=Turn(B))
    gate.may_end.set()

    assert await pool.run(read_niceness, later(), turn=Turn(B, LARGE)) == min(usual + 6, 19)


async def test_callers_take_turns_by_the_cost_of_their_jobs(jobs: Jobs, pool: DecodeThreads) -> None:
    jobs.add(9, A, "A", cost=LARGE, is_batch=True)
    jobs.add(4, A, "a", cost=2 * LARGE)
    jobs.add(4, B, "b", cost=LARGE)
    await asyncio.sleep(0)
    assert pool.waiting == 17
    await jobs.finish()

    assert Counter(jobs.order[:7]) == {"A": 1, "a": 2, "b": 4}
    assert jobs.order[7:] == [*"aa", *"A" * 8]


async def test_closing_ends_all_threads(gate: Gate) -> None:
    before = threading.enumerate()
    pool = DecodeThreads(2)
    tasks = [asyncio.ensure_future(pool.run(gate, later(), turn=Turn(Caller(str(number % 5))))) for number in range(20)]
    await eventually(gate.has_started.is_set)
    gate.may_end.set()
    pool.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)

    assert {type(result) for result in results} <= {str, asyncio.CancelledError}
    assert pool.waiting == 0
    assert set(threading.enumerate()) <= set(before)


async def test_a_shadow_takes_no_thread_of_requests(pool: DecodeThreads, gate: Gate) -> None:
    shadow = Turn(Caller("shadow", priority=SHADOW))
    blocked = [asyncio.ensure_future(pool.run(gate, later(), turn=shadow._replace(cost=cost))) for cost in (0, 1e7)]
    await eventually(gate.has_started.is_set)

    assert await pool.run(lambda: "small", later(), turn=Turn(A)) == "small"
    assert await pool.run(lambda: "large", later(), turn=Turn(A, 1e7)) == "large"
    assert (pool.waiting, [task.done() for task in blocked]) == (1, [False, False])
    gate.may_end.set()
    assert await asyncio.gather(*blocked) == ["done", "done"]
