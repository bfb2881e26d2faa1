"""Share one execution among concurrent calls with the same key."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from functools import partial
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class SingleFlight(Generic[T]):
    """Work in progress, by key. Results are not cached: a call after the end runs the work again."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[T]] = {}

    async def run(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Run `work`, or wait for the current run with the same key; it continues if a waiting caller is cancelled."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(work())
            task.add_done_callback(partial(self._forget, key))
        try:
            return await asyncio.shield(task)
        finally:
            del task  # break the reference cycle: task, exception, traceback, this frame

    async def wait(self) -> None:
        """Wait until nothing is in progress."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    def cancel(self) -> None:
        """Stop the work in progress."""
        for task in self._tasks.values():
            task.cancel()

    def _forget(self, key: Hashable, task: asyncio.Task[T]) -> None:
        del self._tasks[key]
        if not task.cancelled():
            task.exception()  # otherwise asyncio would report it if no caller waits
