"""What a request holds is given back, what many ask for is done once, and what takes too long is interrupted."""

import asyncio
from itertools import permutations

import pytest

from app.resilience.interruption import Interruption
from app.resilience.lease import Lease
from app.resilience.single_flight import SingleFlight
from tests.support import in_cycles


def job() -> "asyncio.Future[None]":
    return asyncio.get_running_loop().create_future()


def end(of: "asyncio.Future[None]", how: str = "result") -> None:
    if how == "cancel":
        of.cancel()
    elif how == "failure":
        of.set_exception(ValueError())
        of.exception()
    else:
        of.set_result(None)


def test_callback_that_fails_does_not_stop_the_others() -> None:
    released: list[str] = []
    lease = Lease()
    lease.on_release(lambda: released.append("first"))
    lease.on_release(lambda: 1 // 0)
    lease.on_release(lambda: released.append("last"))
    with pytest.raises(ZeroDivisionError), lease:
        pass
    lease.release()

    assert released == ["last", "first"]


@pytest.mark.parametrize("how", ["result", "failure", "cancel"])
async def test_last_of_several_jobs_releases_a_lease(how: str) -> None:
    """Also what a job takes after the block: a decoding thread may take a slot after its request has ended."""
    for order in permutations(range(3)):
        released: list[str] = []
        lease, jobs = Lease(), [job() for _ in range(3)]
        lease.on_release(lambda released=released: released.append("memory"))  # type: ignore[misc]
        with lease:
            for of in jobs:
                lease.keep_for(of)
            if order[0] == 0:
                end(jobs[0], how)  # within the block, whose request still uses what the lease holds
                await asyncio.sleep(0)
        lease.on_release(lambda released=released: released.append("slot"))  # type: ignore[misc]
        for index in order:
            assert released == []
            if not jobs[index].done():
                end(jobs[index], how)
            await asyncio.sleep(0)

        assert released == ["slot", "memory"]


class Work:
    """Work that lasts until it may end, and counts its executions."""

    def __init__(self, error: Exception | None = None) -> None:
        self.runs = 0
        self.may_end = asyncio.Event()
        self.error = error

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
    """It goes on when a caller is cancelled, and its result is not kept."""
    flight, work = SingleFlight[int](), Work()
    first, *tasks = [await start(flight, "a", work) for _ in range(5)]
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    work.may_end.set()

    assert await asyncio.gather(*tasks) == [1] * 4
    assert await flight.run("a", work) == 2


async def test_failed_work_raises_its_error_at_each_caller_and_leaves_no_cycle() -> None:
    """A reference cycle would keep the frames of the request, and its image, alive."""
    flight, work = SingleFlight[int](), Work(ValueError("out of order"))
    with in_cycles(ValueError) as kept:
        tasks = [await start(flight, "a", work) for _ in range(3)]
        work.may_end.set()
        failed = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(error) for error in failed] == ["out of order"] * 3
        work.error = None
        assert await flight.run("a", work) == 2
        del tasks, failed
        await asyncio.sleep(0)
    assert kept == []


@pytest.mark.parametrize(
    ("inner", "others", "error"),
    [("", False, ValueError), ("time-out", False, ValueError), ("fails", False, KeyError), ("", True, asyncio.CancelledError)],
    ids=["alone", "time-out at the same time", "clean-up fails", "server stops at the same time"],
)
async def test_interrupted_block_raises_the_reason_unless_something_else_wins(
    inner: str, error: type[BaseException], *, others: bool
) -> None:
    block = Interruption()

    async def work() -> None:
        block.interrupt(ValueError("too early"))
        try:
            with block:
                async with asyncio.timeout(0 if inner == "time-out" else None):
                    if inner == "time-out":
                        block.interrupt(ValueError("too slow"))
                    try:
                        await asyncio.Event().wait()
                    finally:
                        if inner == "fails":
                            raise KeyError
        finally:
            block.interrupt(ValueError("too late"))
            current = asyncio.current_task()
            assert current is not None
            assert bool(current.cancelling()) is others
            if not others:
                await asyncio.sleep(0)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    block.interrupt(ValueError("too slow"))
    if others:
        task.cancel()
    with pytest.raises(error):
        await task
