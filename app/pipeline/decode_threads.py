"""Threads for what would block a worker's event loop: decoding images, parsing bodies, decoding raw model outputs."""

import asyncio
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

from app.errors import DeadlinePassed
from app.resilience.deadline import Deadline
from app.resilience.lease import Lease

T = TypeVar("T")

_LATE = "the request took too long in the gateway"


class DecodeThreads:
    """Runs jobs in order of arrival, a fixed number at a time."""

    def __init__(self, threads: int) -> None:
        self._executor = ThreadPoolExecutor(threads, thread_name_prefix="decode")
        self._jobs: set[Future[Any]] = set()
        """Those that have not ended."""

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a thread."""
        return sum(not job.running() for job in self._jobs.copy())

    def close(self) -> None:
        """Wait for jobs that are running; start no more."""
        self._executor.shutdown(cancel_futures=True)

    async def run(self, work: Callable[[], T], deadline: Deadline, *leases: Lease) -> T:
        """Run `work` in a thread.

        Args:
            work: Dropped, with all it refers to, if this call is cancelled or the deadline passes while it is queued; left
                alone if it runs, because a thread cannot be stopped.
            deadline: When to stop waiting.
            leases: What the work uses; kept until the work has ended, which may be later than this call.

        Raises:
            DeadlinePassed: It took too long.
        """
        if deadline.remaining <= 0:
            raise DeadlinePassed(_LATE)
        queued = [work]  # the queue refers to a cancelled job until a thread takes it
        del work
        job = self._executor.submit(lambda: queued.pop()())  # noqa: PLW0108 - what is queued may be dropped
        self._jobs.add(job)
        job.add_done_callback(self._jobs.discard)
        try:
            async with asyncio.timeout(deadline.remaining):
                return await asyncio.wrap_future(job)
        except TimeoutError as error:
            raise DeadlinePassed(_LATE) from error
        finally:
            if job.cancel():
                queued.clear()
            elif not job.done():
                _keep(leases, job)
            # A failed job refers to its exception, whose traceback refers to this frame and, above it, the image:
            # a reference cycle that only the garbage collector would free.
            del job


def _keep(leases: Iterable[Lease], job: "Future[T]") -> None:
    """Keep leases for a job in a thread; its end is passed on to the event loop."""
    loop = asyncio.get_running_loop()
    ended = loop.create_future()
    for lease in leases:
        lease.keep_for(ended)
    job.add_done_callback(lambda _: loop.call_soon_threadsafe(ended.set_result, None))
