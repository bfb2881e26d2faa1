"""What goes on while something else is tested."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any


@asynccontextmanager
async def meanwhile(*work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines until the block ends, and raise what one of them has raised."""
    tasks = [asyncio.create_task(one) for one in work]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for result in await asyncio.gather(*tasks, return_exceptions=True):
            if isinstance(result, Exception):
                raise result


async def every(seconds: float, action: Callable[[], object]) -> None:
    while True:
        await asyncio.sleep(seconds)
        action()
