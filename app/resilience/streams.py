"""Frames of streams, such as those of cameras, that wait to be admitted to one model.

A newer frame takes the place of the one that waits, so no frame is admitted for which there is a newer one. The next frame may
come to another worker, so each worker publishes its latest frames, and which one it admits next.
"""

import asyncio
from functools import partial
from hashlib import blake2b
from time import monotonic

from app.errors import Superseded
from app.resilience.deadline import Deadline, TurnMissed
from app.resilience.fairness import Caller
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.worker_table import SEPARATOR, WorkerTable

# There is no notification of what happens in other workers.
_POLL_SECONDS = 0.005
# Frames that a worker publishes before it overwrites the first one: more than arrive between two polls.
_PUBLISHED = 64
# A caller may have as many waiting frames in a worker as are still free of so many.
_MAX_WAITING = 256
_MICRO = 1_000_000
_COLUMNS = 1 << 14
_NEWER = "a newer image of this stream takes the place of this one"


class _Frame:
    def __init__(self, caller: Caller, column: int, key: int, age: float) -> None:
        self.caller, self.key = caller, key
        self.flow = caller.priority * _COLUMNS + column
        """Priority of the caller, and column of the table with its frames in progress."""
        self.place = int(monotonic() * _MICRO)
        self.began = self.place - int(age * _MICRO)
        self.turn: asyncio.Future[Permit | None] = asyncio.get_running_loop().create_future()
        """Done with None if there is a newer frame."""


class StreamQueue:
    """Admits the frames of all streams in order of their places, as many as keep the model busy; callers take turns."""

    def __init__(self, queue: ModelQueue, table: WorkerTable, model: str) -> None:
        self.parallel_images = 1
        """Number of images that all Tritons process in parallel."""
        self._queue, self._table, self._model = queue, table, model
        self._active = queue.frame_counts()
        self._next = table.column(f"flow of next frame:{model}"), table.column(f"place of next frame:{model}")
        self._published = table.column("published frames")
        """Number of frames that a worker has published, of all models."""
        self._ring = [[table.column(f"published frame {n} {part}") for part in range(3)] for n in range(_PUBLISHED)]
        self._read: dict[int, int] = {}
        """Number of published frames that this worker has read, by row."""
        self._frames: dict[int, _Frame] = {}
        """The frames that wait in this worker, by hash of their stream."""
        self._poll: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._frames)

    async def admit(self, caller: Caller, stream: str, age: float, deadline: Deadline) -> Permit:
        """Admit a frame whose request began `age` seconds ago.

        Raises Superseded if there is, or comes, a newer one, TurnMissed at the deadline, GatewayFull if too many frames wait, and
        CircuitOpen if Triton has stopped to answer.
        """
        name = SEPARATOR.join((self._model, caller.name, stream)).encode()
        frame = _Frame(caller, self._active.columns[caller.name], int.from_bytes(blake2b(name, digest_size=7).digest()), age)
        self._read_published()  # what is published from now on may be newer
        self._take_place(frame)
        self._publish(frame.key, frame.began, frame.place)
        self._wake()
        try:
            async with asyncio.timeout(deadline.remaining):
                permit = await frame.turn
        except BaseException as error:
            self._forget(frame)
            if frame.turn.done() and not frame.turn.cancelled() and (permit := frame.turn.result()) is not None:
                permit.release()  # the turn came at the same moment
            if isinstance(error, TimeoutError):
                raise TurnMissed("the turn of its stream did not come in time") from None
            raise
        if permit is None:
            raise Superseded(_NEWER)
        return permit

    @property
    def _limit(self) -> int:
        return 2 * self.parallel_images

    def _take_place(self, frame: _Frame) -> None:
        older = self._frames.get(frame.key)
        if older is not None and older.began > frame.began:  # the body took longer
            raise Superseded(_NEWER)
        waiting = sum(other.caller.name == frame.caller.name for other in self._frames.values())
        is_full = older is None and waiting + len(self._frames) >= _MAX_WAITING
        if is_full or (self._queue.is_silent() and self._active.total >= self._limit):
            raise self._queue.full(frame.caller)
        if older is not None:
            frame.place = older.place
            self._end(older, None)
        self._frames[frame.key] = frame

    def _publish(self, *frame: int) -> None:
        """Tell all workers key, begin and place of a frame."""
        number = self._table.cells[self._published]
        for column, value in zip(self._ring[number % _PUBLISHED], frame, strict=True):
            self._table.set(column, value)
        self._table.set(self._published, number + 1)

    def _read_published(self) -> None:
        for published, row in zip(self._table.values(self._published), self._table.rows(), strict=True):
            for number in range(max(self._read.get(row, 0), published - _PUBLISHED), published):
                key, began, place = self._table.of_row(row, *self._ring[number % _PUBLISHED])
                if (frame := self._frames.get(key)) is None:
                    continue
                if began > frame.began:
                    self._end(frame, None)
                    self._publish(key, began, frame.place)
                elif began < frame.began:  # the body of the older one took longer
                    self._publish(key, frame.began, frame.place)
                else:
                    frame.place = min(frame.place, place)
            self._read[row] = published

    def _wake(self) -> None:
        """Answer the frames for which there are newer ones, and admit others while there is room."""
        self._read_published()
        while self._admit_first():
            pass
        if self._poll is not None:
            self._poll.cancel()
        self._poll = asyncio.get_running_loop().call_later(_POLL_SECONDS, self._wake) if self._frames else None

    def _admit_first(self) -> bool:
        """Admit the first frame for which its caller has room; otherwise tell all workers its rank, and return False."""
        full = set[str]()
        for frame in sorted(self._frames.values(), key=lambda frame: self._rank(frame.flow, frame.place)):
            caller = frame.caller
            if caller.name in full:
                continue
            active = self._active.of(caller)
            if 0 < active < self._limit <= active + self._queue.single_requests(caller):
                full.add(caller.name)
                continue
            self._tell_next(frame.flow, frame.place)
            rank, others = self._rank(frame.flow, frame.place), zip(*map(self._table.values, self._next), strict=True)
            is_first = all(rank <= self._rank(flow, place) for flow, place in others if place)
            self._active.add(caller, 1)
            is_next = is_first and self._active.total <= self._limit
            permit = self._queue.try_admit(caller) if is_next else None
            if permit is not None:
                permit.on_release(partial(self._leave, caller))
                self._end(frame, permit)
                return True
            self._active.add(caller, -1)
            if not is_next:
                return False
            full.add(caller.name)
        self._tell_next(0, 0)
        return False

    def _tell_next(self, *flow_and_place: int) -> None:
        for column, value in zip(self._next, flow_and_place, strict=True):
            self._table.set(column, value)

    def _rank(self, flow: int, place: int) -> tuple[int, int, int]:
        priority, column = divmod(flow, _COLUMNS)
        return priority, self._table.total(column), place

    def _end(self, frame: _Frame, permit: Permit | None) -> None:
        self._forget(frame)
        if not frame.turn.done():
            frame.turn.set_result(permit)
        elif permit is not None:  # its request is leaving
            permit.release()

    def _forget(self, frame: _Frame) -> None:
        if self._frames.get(frame.key) is frame:
            del self._frames[frame.key]

    def _leave(self, caller: Caller) -> None:
        self._active.add(caller, -1)
        if self._frames:  # soon, not now: the permit's other resources are released first
            asyncio.get_running_loop().call_soon(self._wake)
