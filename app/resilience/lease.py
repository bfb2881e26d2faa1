"""Resources that a request holds until its work has ended."""

import asyncio
from collections.abc import Callable
from typing import Any, Self, TypeVar


class Lease:
    """Runs callbacks in the event loop when a `with` block and all jobs passed to `keep_for` have ended.

    A decoding thread cannot be stopped, and Triton reads shared memory until the RPC ends, even if the request no longer waits.
    """

    def __init__(self) -> None:
        self._users = 0
        self._callbacks: list[Callable[[], object]] = []
        self.on_release = self._callbacks.append
        """Adds a callback; the last one runs first. May be called from any thread that the lease is kept for."""

    def keep_for(self, job: asyncio.Future[Any]) -> None:
        """Keep the lease at least until the job has ended."""
        self._users += 1
        job.add_done_callback(self.__exit__)

    def keep_until_release(self, other: "Lease") -> None:
        """Keep the lease at least until another one is released."""
        self._users += 1
        other.on_release(self.__exit__)

    def release(self) -> None:
        """Release a lease that was never used."""
        with self:
            pass

    def __enter__(self) -> Self:
        self._users += 1
        return self

    def __exit__(self, *_: object) -> None:
        self._users -= 1
        if self._users == 0 and self._callbacks:
            self._call_back()

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                self._callbacks.pop()()
            except BaseException:
                self._call_back()  # run the others even if one fails
                raise


L = TypeVar("L", bound=Lease)


async def wait_for_lease(turn: asyncio.Future[L], seconds: float) -> L:
    """Wait for a lease; raises TimeoutError. A lease that comes at the moment when the wait ends is released."""
    try:
        async with asyncio.timeout(seconds):
            return await turn
    except BaseException:
        if turn.done() and not turn.cancelled() and turn.exception() is None:
            turn.result().release()
        raise
