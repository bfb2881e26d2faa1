"""A block is left for a reason that arises outside of it."""

import asyncio

import pytest

from app.resilience.interruption import Interruption

REASON = ValueError("too slow")


async def wait(block: Interruption) -> None:
    with block:
        await asyncio.Event().wait()


async def test_the_block_raises_the_reason_and_its_task_goes_on() -> None:
    block = Interruption()
    asyncio.get_running_loop().call_soon(block.interrupt, REASON)
    with pytest.raises(ValueError, match="too slow"):
        await wait(block)

    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    await asyncio.sleep(0)


async def test_after_the_block_nothing_is_interrupted() -> None:
    block = Interruption()
    block.interrupt(REASON)
    with block:
        await asyncio.sleep(0)
    block.interrupt(REASON)

    await asyncio.sleep(0)


async def test_another_cancellation_wins() -> None:
    """The server stops at the same time, so the task has to end."""
    block = Interruption()
    task = asyncio.create_task(wait(block))
    await asyncio.sleep(0)
    block.interrupt(REASON)
    task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await task


async def test_an_error_of_the_block_wins() -> None:
    """The error was raised while the block was being left."""
    block = Interruption()

    async def fail() -> None:
        with block:
            try:
                await asyncio.Event().wait()
            finally:
                raise KeyError("clean-up failed")

    asyncio.get_running_loop().call_soon(block.interrupt, REASON)
    with pytest.raises(KeyError):
        await fail()
    task = asyncio.current_task()
    assert task is not None

    assert task.cancelling() == 0


async def test_a_timeout_within_the_block_does_not_take_its_cancellation() -> None:
    """The time-out and the interruption happen at the same time."""
    block = Interruption()

    async def work() -> None:
        with block:
            async with asyncio.timeout(0):
                block.interrupt(REASON)
                await asyncio.Event().wait()

    with pytest.raises(ValueError, match="too slow"):
        await work()
