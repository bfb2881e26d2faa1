"""Threads for work that would block the event loop: decoding images, parsing bodies, decoding raw model outputs.

Each image passes through here, and a `ThreadPoolExecutor` with `asyncio.wrap_future` takes several times the CPU time.
"""

import asyncio
from collections import Counter
from collections.abc import Callable
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from app.errors import DeadlinePassed
from app.resilience.deadline import Deadline
from app.resilience.fairness import FairQueue, Turn
from app.resilience.lease import Lease

T = TypeVar("T")

_JOB_COST = 1e5  # of a job without pixels, in pixels to decode
_LATE = "the request took too long in the gateway"


class DecodeThreads:
    """Runs the jobs of all callers in turn, in a fixed number of threads.

    One more thread runs jobs of callers that have none in another thread, so that they do not wait for a large image of somebody
    else. Only the event loop changes the queue: a lock that the threads share with it would cost more than the queue itself.
    """

    def __init__(self, threads: int) -> None:
        self._queue: FairQueue[_Job[Any]] = FairQueue()
        """Jobs that are not in a thread's queue."""
        self._jobs: set[_Job[Any]] = set()
        """Jobs that have not ended."""
        self._started: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        """Jobs for the threads: as many as these run, and as many again, because the event loop may be late."""
        self._free = 2 * threads
        """How many more jobs the threads take now."""
        self._extra: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        """A job for the extra thread."""
        self._extra_job: _Job[Any] | None = None
        """The one that it runs."""
        self._running: Counter[str] = Counter()
        """Number of jobs in the queues of the threads, by caller."""
        queues = {f"decode_{number}": self._started for number in range(threads)} | {"decode_extra": self._extra}
        self._threads = [Thread(target=_work, args=(queue,), name=name, daemon=True) for name, queue in queues.items()]
        for thread in self._threads:
            thread.start()

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a thread."""
        return sum(bool(job.queued) for job in self._jobs)

    def close(self) -> None:
        """Wait for the running jobs, and cancel the others."""
        for job in self._jobs.copy():
            if job.take() is not None:
                job.result.cancel()
        for _ in self._threads[:-1]:
            self._started.put(None)
        self._extra.put(None)
        for thread in self._threads:
            thread.join()

    async def run(self, work: Callable[[], T], deadline: Deadline, *leases: Lease, turn: Turn) -> T:
        """Run `work` in a thread.

        Args:
            work: Dropped, so that what it refers to is freed, if this call is cancelled or misses its deadline before a thread has
                taken it. Running work continues, because a thread cannot be stopped.
            deadline: Deadline of this call.
            turn: Whose job it is, and its cost.
            leases: Leases of resources that the work uses; kept until it has ended, which may be later than this call.

        Raises:
            DeadlinePassed: The work did not end in time.
        """
        remaining = deadline.remaining
        if remaining <= 0:
            raise DeadlinePassed(_LATE)
        loop = asyncio.get_running_loop()
        job: _Job[T] = _Job(work, loop, self._end, turn)
        del work
        self._jobs.add(job)
        self._queue.add(job)
        self._start()
        timer = loop.call_later(remaining, job.miss_deadline)
        try:
            return await job.result
        finally:
            timer.cancel()
            if job.take() is not None:
                self._queue.discard(job)
                self._jobs.discard(job)
            elif job in self._jobs:
                for lease in leases:
                    lease.keep_for(job.ended)
            # A failed job refers to its exception, whose traceback refers to this frame and to callers with the image: only the
            # garbage collector would free such a reference cycle.
            del job

    def _start(self) -> None:
        """Give the threads the jobs whose turn it is."""
        are_busy = self._free < len(self._threads)  # one of which is the extra one
        if are_busy and self._extra_job is None and (job := self._queue.next(self._running)) is not None:
            self._extra_job = job
            self._begin(job, self._extra)
        while self._free and (job := self._queue.next()) is not None:
            self._free -= 1
            self._begin(job, self._started)

    def _begin(self, job: "_Job[Any]", queue: "SimpleQueue[_Job[Any] | None]") -> None:
        self._queue.begin(job)
        self._running[job.turn.caller.name] += 1
        queue.put(job)

    def _end(self, job: "_Job[Any]") -> None:
        """Note that a thread has ended a job, or found that it was dropped."""
        self._jobs.discard(job)
        caller = job.turn.caller.name
        self._running[caller] -= 1
        if not self._running[caller]:
            del self._running[caller]
        if job is self._extra_job:
            self._extra_job = None
        else:
            self._free += 1
        self._start()


class _Job(Generic[T]):
    """Work for a thread. All methods but `run` and `take` are called in the event loop."""

    def __init__(
        self, work: Callable[[], T], loop: asyncio.AbstractEventLoop, on_end: Callable[["_Job[T]"], object], turn: Turn
    ) -> None:
        self.turn = Turn(turn.caller, turn.cost + _JOB_COST, turn.is_batch)
        self.queued = [work]
        """Empty once a thread has taken the work, or it was dropped."""
        self._loop = loop
        self._on_end = on_end
        self.result: asyncio.Future[T] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when the thread has ended the work, even if nobody waits for the result any more."""

    def take(self) -> Callable[[], T] | None:
        """Take the work, to run or to drop it; None if that was done before."""
        try:
            return self.queued.pop()
        except IndexError:
            return None

    def miss_deadline(self) -> None:
        """Stop waiting for the result."""
        if not self.result.done():
            self.result.set_exception(DeadlinePassed(_LATE))

    def run(self) -> None:
        """Run the work in this thread, unless it was dropped."""
        work = self.take()
        result: T | None = None
        error: BaseException | None = None
        try:
            result = work() if work is not None else None
        except BaseException as raised:  # noqa: BLE001 - raised by `DecodeThreads.run`
            error = raised
        self._loop.call_soon_threadsafe(self._end, result, error)
        del self, work, error  # the error's traceback refers to this frame

    def _end(self, result: T | None, error: BaseException | None) -> None:
        self._on_end(self)
        self.ended.set_result(None)
        if self.result.done():
            return
        if error is None:
            self.result.set_result(result)  # type: ignore[arg-type]
        else:
            self.result.set_exception(error)


def _work(queue: "SimpleQueue[_Job[Any] | None]") -> None:
    while (job := queue.get()) is not None:
        job.run()
        del job  # while this thread waits, it keeps nothing
