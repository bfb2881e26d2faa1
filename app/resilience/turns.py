"""Turns: a semaphore with deadlines."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from app.errors import DeadlinePassed
from app.resilience.deadline import Deadline


class Turns:
    """Gives turns in order of arrival, a fixed number at a time."""

    def __init__(self, number: int) -> None:
        """Allow `number` turns at a time."""
        self._free = asyncio.Semaphore(number)

    async def acquire(self, deadline: Deadline) -> None:
        """Wait for a turn, which lasts until `release`.

        Raises:
            DeadlinePassed: The deadline passed first.
        """
        try:
            async with asyncio.timeout(deadline.remaining):
                await self._free.acquire()
        except TimeoutError:
            raise DeadlinePassed("the images before it took too long") from None

    def release(self) -> None:
        """End a turn."""
        self._free.release()

    @asynccontextmanager
    async def take(self, deadline: Deadline) -> AsyncIterator[None]:
        """Wait for a turn, which lasts until the end of the block. Raises the same errors as `acquire`."""
        await self.acquire(deadline)
        try:
            yield
        finally:
            self.release()
