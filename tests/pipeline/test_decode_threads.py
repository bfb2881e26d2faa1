"""Blocking work runs in a few threads, in order, and under the deadline of its request."""

import asyncio
import threading
import weakref
from collections.abc import Iterator
from functools import partial

import pytest

from app.errors import DeadlinePassed
from app.pipeline.decode_threads import DecodeThreads
from app.resilience.deadline import Deadline
from app.resilience.lease import Lease
from tests.support import eventually


def later() -> Deadline:
    return Deadline.after(30)


class Gate:
    def __init__(self) -> None:
        self.has_started = threading.Event()
        self.may_end = threading.Event()

    def __call__(self) -> str:
        self.has_started.set()
        self.may_end.wait(10)
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
    blocking = asyncio.ensure_future(pool.run(gate, later(), Lease()))
    waiting = [asyncio.ensure_future(pool.run(lambda n=n: order.append(n), later(), Lease())) for n in range(5)]  # type: ignore[misc]
    assert await eventually(gate.has_started.is_set)
    assert order == []
    gate.may_end.set()
    await asyncio.gather(blocking, *waiting)

    assert order == list(range(5))


@pytest.mark.parametrize("threads", [1, 3])
async def test_only_so_many_jobs_run_at_a_time(threads: int) -> None:
    pool, gates = DecodeThreads(threads), [Gate() for _ in range(5)]
    running = [asyncio.ensure_future(pool.run(gate, later(), Lease())) for gate in gates]
    for ended, gate in enumerate(gates):
        started = min(threads + ended, 5)
        assert await eventually(lambda started=started: sum(gate.has_started.is_set() for gate in gates) == started)  # type: ignore[misc]
        gate.may_end.set()

    assert await asyncio.gather(*running) == ["done"] * 5
    pool.close()


class Image: ...


async def test_a_queued_job_that_is_dropped_frees_what_it_refers_to(pool: DecodeThreads, gate: Gate) -> None:
    """The image of a request that has ended does not stay in memory until a thread is free."""
    blocking = asyncio.ensure_future(pool.run(gate, later(), Lease()))
    assert await eventually(gate.has_started.is_set)
    image = Image()
    left = weakref.ref(image)
    asking = asyncio.ensure_future(pool.run(partial(id, image), later(), Lease()))
    await asyncio.sleep(0)
    del image
    assert left() is not None
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    del asking
    assert left() is None
    gate.may_end.set()

    assert await blocking == "done"


async def test_a_job_whose_deadline_has_passed_does_not_run_on_an_idle_pool(pool: DecodeThreads) -> None:
    """An idle thread could start it before the event loop notices the missed deadline."""
    ran: list[bool] = []
    for _ in range(100):
        with pytest.raises(DeadlinePassed, match="took too long"):
            await pool.run(lambda: ran.append(True), Deadline.after(-1), Lease())
    await pool.run(lambda: None, later(), Lease())

    assert ran == []


async def test_a_job_that_has_ended_keeps_nothing(pool: DecodeThreads) -> None:
    released: list[bool] = []
    with Lease() as lease:
        lease.on_release(lambda: released.append(True))
        assert await pool.run(lambda: 7, later(), lease) == 7
        assert released == []

    assert released == [True]


async def test_closing_waits_for_running_jobs_and_drops_the_others(gate: Gate) -> None:
    """The memory that a thread writes to must exist until the thread has ended."""
    pool = DecodeThreads(1)
    ran: list[bool] = []
    running = asyncio.ensure_future(pool.run(gate, later(), Lease()))
    waiting = asyncio.ensure_future(pool.run(lambda: ran.append(True), later(), Lease()))
    assert await eventually(gate.has_started.is_set)
    threading.Timer(0.1, gate.may_end.set).start()
    pool.close()

    assert gate.may_end.is_set()
    assert await running == "done"
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert ran == []
