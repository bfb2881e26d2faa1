"""Threads for work that would block the event loop: decoding images, parsing bodies, decoding raw model outputs.

Each image passes through here, and a `ThreadPoolExecutor` with `asyncio.wrap_future` takes several times the CPU time.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from threading import Thread
from typing import Any, Generic, TypeVar

from app.errors import DeadlinePassed
from app.resilience.deadline import Deadline
from app.resilience.decode_backlog import LARGE_PIXELS
from app.resilience.fairness import SHADOW, FairQueue, Turn
from app.resilience.lease import Lease

T = TypeVar("T")

_JOB_COST = 1e5  # of a job without pixels, in pixels to decode
# Nice value of threads that decode large images, above the usual one: if both want a CPU, they get a fifth of it. With 0, small
# images wait four times as long beside large ones; with 10, only half as many large PNGs and GIFs are answered (`bench fair`).
_NICENESS = 6
_LATE = "the request took too long in the gateway"


class DecodeThreads:
    """Runs the jobs of all callers in turn, in a fixed number of threads, and large images and bodies in as many others.

    The others have a lower priority than all else in this session or container, such as a model that runs on the same CPUs. Shadows
    have a thread of their own. Only the event loop changes the queues: a lock would cost more than the queues themselves.
    """

    def __init__(self, threads: int) -> None:
        self._jobs: set[_Job[Any]] = set()
        # The event loop may be late, which does not matter between large images.
        self._small = _Lane("decode", threads, ahead=threads, niceness=0)
        self._large = _Lane("decode_large", threads, ahead=0, niceness=_NICENESS)
        self._shadow: _Lane | None = None

    @property
    def waiting(self) -> int:
        """Number of jobs that wait for a thread."""
        return sum(bool(job.queued) for job in self._jobs)

    def close(self) -> None:
        """Wait for the running jobs, and cancel the others."""
        for job in self._jobs.copy():
            if job.take() is not None:
                job.result.cancel()
        for lane in filter(None, (self._small, self._large, self._shadow)):
            lane.close()

    async def run(self, work: Callable[[], T], deadline: Deadline, *leases: Lease, turn: Turn) -> T:
        """Run `work`, which cannot be stopped, in a thread, and keep the leases until it has ended; raises DeadlinePassed.

        It is dropped, so that what it refers to is freed, if this is cancelled or late before a thread has taken it.
        """
        remaining = deadline.remaining
        if remaining <= 0:
            raise DeadlinePassed(_LATE)
        loop = asyncio.get_running_loop()
        lane = self._lane(turn)
        job: _Job[T] = _Job(work, loop, partial(self._end, lane), turn)
        del work
        self._jobs.add(job)
        lane.queue.add(job)
        lane.start()
        timer = loop.call_later(remaining, job.miss_deadline)
        try:
            return await job.result
        finally:
            timer.cancel()
            if job.queued and job.take() is not None:
                lane.queue.discard(job)
                self._jobs.discard(job)
            elif job in self._jobs:
                for lease in leases:
                    lease.keep_for(job.ended)
            # A failed job refers to its exception, whose traceback refers to this frame and to callers with the image: only the
            # garbage collector would free such a reference cycle.
            del job

    def _lane(self, turn: Turn) -> "_Lane":
        if turn.caller.priority == SHADOW:
            self._shadow = self._shadow or _Lane("decode_shadow", 1, ahead=0, niceness=_NICENESS)
            return self._shadow
        return self._small if turn.cost < LARGE_PIXELS else self._large

    def _end(self, lane: "_Lane", job: "_Job[Any]") -> None:
        self._jobs.discard(job)
        lane.free += 1
        lane.start()


class _Lane:
    def __init__(self, name: str, threads: int, *, ahead: int, niceness: int) -> None:
        self.queue: FairQueue[_Job[Any]] = FairQueue()
        """Jobs that the threads do not have."""
        self._started: SimpleQueue[_Job[Any] | None] = SimpleQueue()
        """Jobs for the threads: as many as these run, and `ahead` more."""
        self.free = threads + ahead
        """How many more jobs the threads take now."""
        arguments = self._started, niceness
        self._threads = [Thread(target=_work, args=arguments, name=f"{name}_{each}", daemon=True) for each in range(threads)]
        for thread in self._threads:
            thread.start()

    def start(self) -> None:
        while self.free and (job := self.queue.next()) is not None:
            self.free -= 1
            self.queue.begin(job)
            self._started.put(job)

    def close(self) -> None:
        for _ in self._threads:
            self._started.put(None)
        for thread in self._threads:
            thread.join()


class _Job(Generic[T]):
    """Work for a thread. All methods but `run` and `take` are called in the event loop."""

    def __init__(
        self, work: Callable[[], T], loop: asyncio.AbstractEventLoop, on_end: Callable[["_Job[T]"], object], turn: Turn
    ) -> None:
        self.turn = Turn(turn.caller, turn.cost + _JOB_COST, turn.is_batch, turn.is_frame)
        self.queued = [work]
        """Empty once a thread has taken the work, or it was dropped."""
        self._loop = loop
        self._on_end = on_end
        self.result: asyncio.Future[T] = loop.create_future()
        self.ended: asyncio.Future[None] = loop.create_future()
        """Done when the thread has ended the work, even if nobody waits for the result any more."""

    def take(self) -> Callable[[], T] | None:
        try:
            return self.queued.pop()
        except IndexError:
            return None

    def miss_deadline(self) -> None:
        if not self.result.done():
            self.result.set_exception(DeadlinePassed(_LATE))

    def run(self) -> None:
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


def _work(queue: "SimpleQueue[_Job[Any] | None]", niceness: int) -> None:
    with suppress(OSError):  # the kernel may be told to refuse it
        os.nice(niceness)  # of this thread only
    while (job := queue.get()) is not None:
        job.run()
        del job  # while this thread waits, it keeps nothing
