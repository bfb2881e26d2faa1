"""A semaphore with deadlines, for work such as decoding images of batches."""

import asyncio

from app.errors import DeadlinePassed
from app.resilience.deadline import Deadline
from app.resilience.lease import Lease


class DeadlineSemaphore:
    """A semaphore that is acquired in order of arrival, and before a deadline."""

    def __init__(self, number: int) -> None:
        """Allow `number` holders at a time."""
        self._free = asyncio.Semaphore(number)

    async def take(self, deadline: Deadline) -> Lease:
        """Wait until the semaphore is acquired; it is released with the lease.

        Raises:
            DeadlinePassed: The deadline passed first.
        """
        try:
            async with asyncio.timeout(deadline.remaining):
                await self._free.acquire()
        except TimeoutError:
            raise DeadlinePassed("the images before it took too long") from None
        turn = Lease()
        turn.on_release(self._free.release)
        return turn
