"""Concurrent calls for the same thing share one execution."""

import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from app.resilience.single_flight import SingleFlight


class Work:
    """Work that lasts until it may end, and counts its executions."""

    def __init__(self) -> None:
        self.runs = 0
        self.may_end = asyncio.Event()
        self.error: Exception | None = None

    async def __call__(self) -> int:
        self.runs += 1
        run = self.runs
        await self.may_end.wait()
        if self.error is not None:
            raise self.error
        return run


async def start(flight: SingleFlight[int], key: str, work: Work) -> asyncio.Task[int]:
    """Call `run` in a task, and let it get as far as it can."""
    task = asyncio.create_task(flight.run(key, work))
    for _ in range(3):
        await asyncio.sleep(0)
    return task


async def test_concurrent_calls_share_one_execution() -> None:
    flight, work = SingleFlight[int](), Work()
    tasks = [await start(flight, "a", work) for _ in range(5)]
    work.may_end.set()

    assert await asyncio.gather(*tasks) == [1] * 5
    assert work.runs == 1


async def test_result_is_not_kept() -> None:
    flight, work = SingleFlight[int](), Work()
    work.may_end.set()

    assert [await flight.run("a", work) for _ in range(3)] == [1, 2, 3]


async def test_failed_work_raises_its_error_at_each_caller() -> None:
    flight, work = SingleFlight[int](), Work()
    work.error = ValueError("out of order")
    tasks = [await start(flight, "a", work) for _ in range(3)]
    work.may_end.set()

    assert await asyncio.gather(*tasks, return_exceptions=True) == [work.error] * 3

    work.error = None
    assert await flight.run("a", work) == 2


async def test_work_continues_when_a_caller_is_cancelled() -> None:
    flight, work = SingleFlight[int](), Work()
    first, second = await start(flight, "a", work), await start(flight, "a", work)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    work.may_end.set()

    assert await second == 1
    assert work.runs == 1


async def test_wait_returns_when_nothing_is_in_progress() -> None:
    flight, good, bad = SingleFlight[int](), Work(), Work()
    bad.error = ValueError("out of order")
    abandoned, failing = await start(flight, "good", good), await start(flight, "bad", bad)
    abandoned.cancel()
    waiting = asyncio.create_task(flight.wait())
    bad.may_end.set()
    await asyncio.gather(failing, return_exceptions=True)
    assert not waiting.done()
    good.may_end.set()

    await waiting
    assert (good.runs, bad.runs) == (1, 1)


@pytest.fixture
def without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class OutOfOrderError(Exception):
    """An exception that can be referred to weakly."""


@pytest.mark.usefixtures("without_gc")
async def test_error_is_freed_without_the_garbage_collector() -> None:
    """A failure leaves no reference cycle, which would keep the frames of the request, and its image, alive."""

    async def fail() -> int:
        raise OutOfOrderError

    async def call() -> "weakref.ref[OutOfOrderError]":
        try:
            await SingleFlight[int]().run("a", fail)
        except OutOfOrderError as error:
            return weakref.ref(error)
        pytest.fail("the work did not fail")

    error = await call()
    await asyncio.sleep(0)

    assert error() is None
