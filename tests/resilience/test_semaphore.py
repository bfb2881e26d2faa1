"""DeadlineSemaphore of images at what few of them may do at a time."""

import asyncio

import pytest

from app.errors import DeadlinePassed
from app.resilience.deadline import Deadline
from app.resilience.semaphore import DeadlineSemaphore


async def test_turns_come_in_order_of_arrival() -> None:
    """No more at a time than there are; the end of a block gives the next one its turn, also after an error."""
    turns = DeadlineSemaphore(2)
    begun: list[int] = []
    may_end = asyncio.Event()

    async def use(number: int) -> None:
        with await turns.take(Deadline.after(60)):
            begun.append(number)
            await may_end.wait()
            raise ValueError

    tasks = [asyncio.create_task(use(number)) for number in range(5)]
    for _ in range(10):
        await asyncio.sleep(0)
    assert begun == [0, 1]
    may_end.set()

    assert all(isinstance(error, ValueError) for error in await asyncio.gather(*tasks, return_exceptions=True))
    assert begun == [0, 1, 2, 3, 4]


async def test_a_turn_that_does_not_come_in_time_is_an_error() -> None:
    """It says what was slow, and takes no later turn; what is slow in a turn is another matter."""
    turns = DeadlineSemaphore(1)
    with await turns.take(Deadline.after(0.01)):
        with pytest.raises(DeadlinePassed, match=r"^the images before it took too long$"):
            await turns.take(Deadline.after(0.01))
        await asyncio.sleep(0)  # by now, the time of the first turn has passed, too
    (await turns.take(Deadline.after(60))).release()
