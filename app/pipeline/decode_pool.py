"""Threads for what would block a worker's event loop: decoding images, parsing bodies, decoding raw model outputs."""

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from app.errors import DeadlinePassed
from app.resilience.deadline import Deadline

T = TypeVar("T")


class DecodePool:
    """Runs jobs in order of arrival, a fixed number at a time."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="decode")

    def close(self) -> None:
        """Wait for jobs that are running; start no more."""
        self._executor.shutdown(cancel_futures=True)

    async def run(self, work: Callable[[], T], deadline: Deadline, on_start: Callable[["Future[T]"], None] | None = None) -> T:
        """Run `work` in a thread.

        Args:
            work: Dropped if it is still queued at the deadline; left alone if it runs, because a thread cannot be stopped.
            deadline: When to stop waiting.
            on_start: Called with the job, which may outlive this call.

        Raises:
            DeadlinePassed: It took too long.
        """
        job = self._executor.submit(work)
        if on_start is not None:
            on_start(job)
        try:
            async with asyncio.timeout(deadline.remaining):
                return await asyncio.wrap_future(job)
        except TimeoutError as error:
            raise DeadlinePassed("the request took too long in the gateway") from error
        finally:
            # A failed job refers to its exception, whose traceback refers to this frame and, above it, the image:
            # a reference cycle that only the garbage collector would free.
            del job
