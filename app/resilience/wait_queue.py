"""Requests that wait for a lease, in order of arrival."""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from app.resilience.lease import Lease

# There is no notification when a request of another worker ends.
_POLL_SECONDS = 0.005

L = TypeVar("L", bound=Lease)


class WaitQueue(Generic[L]):
    """Requests of one worker that wait for a lease."""

    def __init__(self, enter: Callable[[], L | None]) -> None:
        """Start empty; `enter` returns a lease if there is room for one more."""
        self._enter = enter
        self._turns: deque[asyncio.Future[L]] = deque()
        self._poll: asyncio.TimerHandle | None = None
        """Timer of the next check for room."""

    def __len__(self) -> int:
        """Return the number of waiting requests."""
        return len(self._turns)

    async def wait(self, seconds: float) -> L:
        """Wait for a turn, at the end of the queue.

        Raises:
            TimeoutError: The turn did not come in time.
        """
        turn: asyncio.Future[L] = asyncio.get_running_loop().create_future()
        self._turns.append(turn)
        if self._poll is None:
            self._look()
        try:
            async with asyncio.timeout(seconds):
                return await turn
        except BaseException:
            if turn in self._turns:
                self._turns.remove(turn)
            elif not turn.cancelled():  # the turn came at the same moment
                turn.result().release()
            raise

    def wake(self) -> None:
        """Admit waiting requests while there is room."""
        while self._turns:
            turn = self._turns.popleft()
            if turn.cancelled():
                continue
            lease = self._enter()
            if lease is None:
                self._turns.appendleft(turn)
                return
            turn.set_result(lease)

    def _look(self) -> None:
        """Check periodically whether requests of other workers have ended."""
        self._poll = None
        self.wake()
        if self._turns:
            self._poll = asyncio.get_running_loop().call_later(_POLL_SECONDS, self._look)
