"""Frames of streams, such as those of cameras, that wait to be admitted to one model.

A newer frame takes the place of the one that waits, so no frame is admitted for which there is a newer one. The next frame may
come to another worker, so the table of workers has the places of the waiting frames, and which of them each worker admits next.
"""

import asyncio
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b
from time import monotonic

from app.errors import DeadlinePassed, Superseded
from app.resilience.deadline import Deadline
from app.resilience.fairness import Caller
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.worker_table import SEPARATOR, WorkerTable

# There is no notification of what happens in other workers.
_POLL_SECONDS = 0.005
# Room is left for this long to a frame of another worker, which may have stopped.
_PATIENCE_SECONDS = 0.05
# A place is a time in ticks. In the table, it is followed by a mark, part of a hash, which tells streams of the same cell apart.
_TICKS = 1 << 14
_MARK = (1 << 22) - 1
_CELLS, _PROBES = 1024, 4
_PLACES = 1 << 41  # in four years
_COLUMNS = 1 << 14
_NEWER = "a newer image of this stream takes the place of this one"


class _Frame:
    def __init__(self, caller: Caller, key: int, began: int) -> None:
        self.caller, self.key, self.began = caller, key, began
        self.place = 0
        self.cell: int | None = None
        """Column with the place; None if the frame is unknown to other workers."""
        self.turn: asyncio.Future[Permit | None] = asyncio.get_running_loop().create_future()
        """Done with None if there is a newer frame."""


class StreamQueue:
    """Admits the frames of all streams in order of their places, as many as keep the model busy; callers take turns."""

    def __init__(self, queue: ModelQueue, table: WorkerTable, model: str) -> None:
        self.parallel_images = 1
        """Number of images that all Tritons process in parallel."""
        self._queue, self._table, self._model = queue, table, model
        self._active = queue.frame_counts()
        self._next = table.column(f"next frame:{model}")
        self._frames: dict[int, _Frame] = {}
        """The frames that wait in this worker, by hash of their stream."""
        self._yields_since = 0.0
        """Since when there has been room that is left to a frame of another worker; 0 if there is none."""
        self._poll: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._frames)

    async def admit(self, caller: Caller, stream: str, age: float, deadline: Deadline) -> Permit:
        """Admit a frame whose request began `age` seconds ago; raises Superseded if there is, or comes, a newer one."""
        name = SEPARATOR.join((self._model, caller.name, stream)).encode()
        key, began = int.from_bytes(blake2b(name, digest_size=7).digest()), int((monotonic() - age) * _TICKS)
        frame = _Frame(caller, key, began)
        self._take_place(frame)
        self._wake()
        try:
            async with asyncio.timeout(deadline.remaining):
                permit = await frame.turn
        except BaseException as error:
            self._forget(frame)
            if frame.turn.done() and not frame.turn.cancelled() and (permit := frame.turn.result()) is not None:
                permit.release()  # the turn came at the same moment
            if isinstance(error, TimeoutError):
                raise DeadlinePassed("the turn of its stream did not come in time") from None
            raise
        if permit is None:
            raise Superseded(_NEWER)
        return permit

    def _take_place(self, frame: _Frame) -> None:
        older = self._frames.get(frame.key)
        if self._is_superseded(frame) or (older is not None and older.began > frame.began):  # the body took longer
            raise Superseded(_NEWER)
        places = [place for place, _ in self._waiting(frame.key) if place]
        frame.place = min(places, default=int(monotonic() * _TICKS))
        if older is not None:
            frame.place = min(frame.place, older.place)
            self._end(older, None)
        self._frames[frame.key] = frame
        for place, began in self._columns(frame.key):
            if not self._table.cells[place]:
                self._table.set(began, frame.began)
                self._table.set(place, frame.place * (_MARK + 1) + _mark(frame.key))
                frame.cell = place
                break

    def _wake(self) -> None:
        """Answer the frames for which there are newer ones, and admit others while there is room."""
        for waiting in list(self._frames.values()):
            if self._is_superseded(waiting):
                self._end(waiting, None)
        full = set[str]()
        self._table.set(self._next, 0)
        while (frame := self._first(full)) is not None:
            code, now = self._encode(frame), monotonic()
            is_later = any(other and self._rank(other) < self._rank(code) for other in self._table.values(self._next))
            ahead = self._queue.single_requests(frame.caller)
            self._active.add(frame.caller, 1)
            has_room = ahead + self._active.total <= max(1, int(self.parallel_images * (1 + self._queue.request_calls)))
            self._yields_since = (self._yields_since or now) if has_room and is_later else 0.0
            is_next = has_room and (not is_later or now - self._yields_since > _PATIENCE_SECONDS)
            permit = self._queue.try_admit(frame.caller) if is_next else None
            if permit is not None:
                permit.on_release(partial(self._leave, frame.caller))
                self._end(frame, permit)
                continue
            self._active.add(frame.caller, -1)
            if not is_next:
                self._table.set(self._next, code)
                break
            full.add(frame.caller.name)
        if self._frames and self._poll is None:
            self._poll = asyncio.get_running_loop().call_later(_POLL_SECONDS, self._look)

    def _look(self) -> None:
        self._poll = None
        self._wake()

    def _first(self, full: set[str]) -> _Frame | None:
        waiting = [frame for frame in self._frames.values() if frame.caller.name not in full]
        return min(waiting, key=lambda frame: self._rank(self._encode(frame)), default=None)

    def _encode(self, frame: _Frame) -> int:
        return (frame.caller.priority * _COLUMNS + self._active.column(frame.caller)) * _PLACES + frame.place

    def _rank(self, code: int) -> tuple[int, int, int]:
        priority, column = divmod(code // _PLACES, _COLUMNS)
        return priority, self._table.total(column), code % _PLACES

    def _end(self, frame: _Frame, permit: Permit | None) -> None:
        if permit is not None and frame.cell is not None:  # older ones in other workers look for it
            self._table.set(frame.cell, _mark(frame.key))
            asyncio.get_running_loop().call_later(2 * _POLL_SECONDS, self._table.set, frame.cell, 0)
            frame.cell = None
        self._forget(frame)
        if not frame.turn.done():
            frame.turn.set_result(permit)
        elif permit is not None:  # its request is leaving
            permit.release()

    def _forget(self, frame: _Frame) -> None:
        if self._frames.get(frame.key) is frame:
            del self._frames[frame.key]
        if frame.cell is not None:
            self._table.set(frame.cell, 0)
            frame.cell = None

    def _leave(self, caller: Caller) -> None:
        self._active.add(caller, -1)
        if self._frames:  # soon, not now: the permit's other resources are released first
            asyncio.get_running_loop().call_soon(self._wake)

    def _is_superseded(self, frame: _Frame) -> bool:
        return any(began > frame.began for _, began in self._waiting(frame.key))

    def _waiting(self, key: int) -> Iterator[tuple[int, int]]:
        """Yield place and begin of each frame of a stream that waits in any worker, or was just admitted, with 0 as its place."""
        for place, began in self._columns(key):
            for own, time in zip(self._table.values(place), self._table.values(began), strict=True):
                if own and own & _MARK == _mark(key):
                    yield own // (_MARK + 1), time

    def _columns(self, key: int) -> Iterator[tuple[int, int]]:
        for number in range(key % _CELLS, key % _CELLS + _PROBES):
            yield self._table.column(f"stream place {number}"), self._table.column(f"stream began {number}")


def _mark(key: int) -> int:
    return key // _CELLS & _MARK
