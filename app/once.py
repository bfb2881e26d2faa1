"""Those who ask for the same at the same time get one answer."""

import asyncio
from collections.abc import Callable, Coroutine, Hashable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Once(Generic[T]):
    """Work under way, by what it is for. What has ended is forgotten."""

    def __init__(self) -> None:
        self._tasks: dict[Hashable, asyncio.Task[T]] = {}

    async def ask(self, key: Hashable, work: Callable[[], Coroutine[Any, Any, T]]) -> T:
        """Do the work, or wait for whoever does it already. It goes on when who waits for it is cancelled."""
        task = self._tasks.get(key)
        if task is None:
            task = self._tasks[key] = asyncio.create_task(work())
            task.add_done_callback(lambda _: self._tasks.pop(key))
        try:
            return await asyncio.shield(task)
        finally:
            del task  # it holds the error, whose traceback holds this frame

    async def settle(self) -> None:
        """Wait for what is under way."""
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
