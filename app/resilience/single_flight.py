"""Concurrent calls for the same thing share one execution."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Work in progress by key. A result is not kept: the next call after it starts anew."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[T]] = {}

    async def run(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work`, or wait for the run of the same key that is in progress.

        The work continues when a caller that waits for it is cancelled.
        """
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(work())
            task.add_done_callback(partial(self._forget, key))
        try:
            return await asyncio.shield(task)
        finally:
            del task  # a failed task refers to its exception, whose traceback refers to this frame

    async def wait(self) -> None:
        """Wait until nothing is in progress."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def _forget(self, key: Hashable, task: asyncio.Task[T]) -> None:
        """Forget work that has ended, and retrieve its exception, which asyncio would report if no caller waits any more."""
        del self._tasks[key]
        if not task.cancelled():
            task.exception()
