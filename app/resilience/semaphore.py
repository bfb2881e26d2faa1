"""A semaphore with deadlines, for work such as decoding images of batches."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.errors import DeadlinePassed
from app.resilience.deadline import Deadline


class DeadlineSemaphore:
    """A semaphore that is acquired in order of arrival, and before a deadline."""

    def __init__(self, number: int) -> None:
        """Allow `number` holders at a time."""
        self._free = asyncio.Semaphore(number)

    async def acquire(self, deadline: Deadline) -> None:
        """Wait until the semaphore is acquired; call `release` afterwards.

        Raises:
            DeadlinePassed: The deadline passed first.
        """
        try:
            async with asyncio.timeout(deadline.remaining):
                await self._free.acquire()
        except TimeoutError:
            raise DeadlinePassed("the images before it took too long") from None

    def release(self) -> None:
        """Release the semaphore."""
        self._free.release()

    @asynccontextmanager
    async def take(self, deadline: Deadline) -> AsyncIterator[None]:
        """Hold the semaphore during a block. Raises the same errors as `acquire`."""
        await self.acquire(deadline)
        try:
            yield
        finally:
            self.release()
