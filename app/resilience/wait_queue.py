"""Requests that wait for a lease, in order of priority and arrival."""

import asyncio
from collections.abc import Callable
from typing import Generic

from app.resilience.fairness import NORMAL
from app.resilience.lease import L, wait_for_lease


class WaitQueue(Generic[L]):
    """Requests of one worker that wait for a lease."""

    def __init__(self, poll_seconds: float = 0.005) -> None:
        """Start empty; look for room this often, because there is no notification when a request of another worker ends."""
        self._poll_seconds = poll_seconds
        self._turns: dict[asyncio.Future[L], tuple[float, Callable[[], L | None]]] = {}
        """The priority of each request, and what makes its lease, or None while there is no room; in order of arrival."""
        self._poll: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._turns)

    def has(self, enter: Callable[[], L | None]) -> bool:
        """Return whether a request waits for a lease that `enter` makes."""
        return bool(self._turns) and any(own is enter for _, own in self._turns.values())

    def ahead_of(self, priority: float) -> int:
        """Return the number of waiting requests that come before a new one of this priority."""
        return sum(own <= priority for own, _ in self._turns.values())

    async def wait(self, enter: Callable[[], L | None], seconds: float, priority: float = NORMAL) -> L:
        """Wait behind all requests of this priority and higher ones until `enter` returns a lease; raises TimeoutError."""
        turn: asyncio.Future[L] = asyncio.get_running_loop().create_future()
        self._turns[turn] = priority, enter
        if self._poll is None:
            self._look()
        try:
            return await wait_for_lease(turn, seconds)
        finally:
            self._turns.pop(turn, None)

    def wake(self) -> None:
        """Admit waiting requests for which there is room."""
        if not self._turns:  # as usual
            return
        full = set[Callable[[], L | None]]()
        for turn, (_, enter) in sorted(self._turns.items(), key=lambda item: item[1][0]):
            if turn.cancelled() or enter in full:
                continue
            lease = enter()
            if lease is None:
                full.add(enter)
            else:
                del self._turns[turn]
                turn.set_result(lease)

    def _look(self) -> None:
        self._poll = None
        self.wake()
        if self._turns:
            self._poll = asyncio.get_running_loop().call_later(self._poll_seconds, self._look)
