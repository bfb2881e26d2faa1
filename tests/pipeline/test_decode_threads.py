"""Blocking work runs in a few threads, in the turn of its caller, and under the deadline of its request."""

import asyncio
import os
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
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

A, B = Caller("a"), Caller("b")
LARGE = 1e6
"""Pixels of an image that is decoded in another thread."""


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


def start(pool: DecodeThreads, work: Callable[[], Any], turn: Turn = Turn(A)) -> asyncio.Future[Any]:  # noqa: B008 - a constant
    return asyncio.ensure_future(pool.run(work, Deadline.after(30), turn=turn))


@pytest.mark.parametrize("threads", [1, 3])
async def test_so_many_jobs_run_at_a_time_in_order_of_arrival(threads: int) -> None:
    pool, gates = DecodeThreads(threads), [Gate() for _ in range(5)]
    running = [start(pool, gate) for gate in gates]
    for ended, gate in enumerate(gates):
        started = min(threads + ended, 5)
        await eventually(lambda started=started: sum(gate.has_started.is_set() for gate in gates) == started)  # type: ignore[misc]
        assert all(gate.has_started.is_set() for gate in gates[:started])
        gate.may_end.set()

    assert await asyncio.gather(*running) == ["done"] * 5
    pool.close()


class Image: ...


@pytest.mark.parametrize("is_late", [False, True])
async def test_queued_job_that_is_dropped_frees_what_it_refers_to(pool: DecodeThreads, gate: Gate, *, is_late: bool) -> None:
    """The image of a request that has left or missed its deadline does not stay in memory until a thread is free."""
    deadline: Any = SimpleNamespace(remaining=0.001 if is_late else 30)
    blocking = start(pool, gate)
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


async def test_job_whose_deadline_has_passed_does_not_run_on_an_idle_pool(pool: DecodeThreads) -> None:
    """An idle thread could start it before the event loop notices the missed deadline."""
    ran: list[bool] = []
    for _ in range(100):
        with pytest.raises(DeadlinePassed, match="took too long"):
            await pool.run(lambda: ran.append(True), Deadline.after(-1), turn=Turn(A))
    await start(pool, list)

    assert ran == []


async def test_leases_are_kept_as_long_as_the_job_runs(pool: DecodeThreads, gate: Gate) -> None:
    released: list[str] = []

    async def run(name: str, work: Callable[[], object]) -> None:
        with Lease() as lease:
            lease.on_release(lambda: released.append(name))
            await pool.run(work, Deadline.after(30), lease, turn=Turn(A))
            assert name not in released

    await run("ended", list)
    assert released == ["ended"]
    left = asyncio.ensure_future(run("left", gate))
    await eventually(gate.has_started.is_set)
    left.cancel()
    await asyncio.gather(left, return_exceptions=True)
    assert released == ["ended"]
    gate.may_end.set()

    await eventually(lambda: released == ["ended", "left"])


async def test_closing_waits_for_running_jobs_drops_the_others_and_ends_all_threads(gate: Gate) -> None:
    """The memory that a thread writes to must exist until the thread has ended."""
    before = threading.enumerate()
    pool, ran = DecodeThreads(1), list[bool]()
    running, waiting = start(pool, gate), start(pool, lambda: ran.append(True))
    await eventually(gate.has_started.is_set)
    threading.Timer(0.1, gate.may_end.set).start()
    pool.close()

    assert gate.may_end.is_set()
    assert await running == "done"
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert (ran, pool.waiting) == ([], 0)
    assert set(threading.enumerate()) <= set(before)


async def test_large_images_and_shadows_have_threads_of_their_own(pool: DecodeThreads, gate: Gate) -> None:
    """Those of large images have a lower priority."""
    shadow = Turn(Caller("shadow", priority=SHADOW))
    blocked = [start(pool, gate, shadow._replace(cost=cost)) for cost in (0, 1e7)]
    await eventually(gate.has_started.is_set)
    read_niceness = partial(os.getpriority, os.PRIO_PROCESS, 0)
    usual = await start(pool, read_niceness, Turn(B))
    assert await start(pool, read_niceness, Turn(B, LARGE)) == min(usual + 6, 19)
    large = Gate()
    blocked.append(start(pool, large, Turn(A, LARGE)))
    await eventually(large.has_started.is_set)

    assert await start(pool, lambda: "small") == "small"
    assert (pool.waiting, [task.done() for task in blocked]) == (1, [False] * 3)
    for each in (gate, large):
        each.may_end.set()
    assert await asyncio.gather(*blocked) == ["done"] * 3


async def test_callers_take_turns_by_the_cost_of_their_jobs(pool: DecodeThreads, gate: Gate) -> None:
    order: list[str] = []
    running = [start(pool, gate, Turn(A, LARGE))]
    await eventually(gate.has_started.is_set)
    for number, caller, name, cost in ((9, A, "A", LARGE), (4, A, "a", 2 * LARGE), (4, B, "b", LARGE)):
        turn = Turn(caller, cost, is_batch=name == "A")
        running += [start(pool, partial(order.append, name), turn) for _ in range(number)]
    await asyncio.sleep(0)
    assert pool.waiting == 17
    gate.may_end.set()
    await asyncio.gather(*running)

    assert Counter(order[:7]) == {"A": 1, "a": 2, "b": 4}
    assert order[7:] == [*"aa", *"A" * 8]
