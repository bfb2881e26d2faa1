"""Frames of streams that wait for a model. The next one may come to another worker: all write which is the newest, and the next."""

import asyncio
from collections.abc import Callable
from functools import partial
from hashlib import blake2b
from time import monotonic

from app.errors import Superseded
from app.resilience.deadline import Deadline, TurnMissed
from app.resilience.fairness import Caller, CallerCounts
from app.resilience.lease import wait_for_lease
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.worker_table import SEPARATOR, WorkerTable

# There is no notification of what happens in other workers. One that has not looked for so long hangs, and does not count.
_POLL_SECONDS, _HUNG_SECONDS = 0.005, 1
# A caller may have as many waiting frames in a worker as are still free of so many.
_MAX_WAITING = 256
# Each has three of the shared cells: the key of a stream, when its newest frame began, and the turn of this frame.
_STREAMS, _NO_TURN = 4096, 1 << 62
# A turn consists of the priority of the caller, the column of the table with its frames in progress (14 bits), and a time (46).
_TICKS_PER_SECOND = 100_000


class _Frame:
    def __init__(self, caller: Caller, column: int, name: str, began: float) -> None:
        self.caller, self.cells = caller, slice(0)
        self.key = int.from_bytes(blake2b(name.encode(), digest_size=7).digest())
        self.began = int(began * _TICKS_PER_SECOND)
        self.turn = (caller.priority << 60) + (column << 46) + int(monotonic() * _TICKS_PER_SECOND)
        self.permit: asyncio.Future[Permit] = asyncio.get_running_loop().create_future()


class StreamQueue(ModelQueue):
    """Admits frames of streams, too: as many as keep the model busy, callers in turn, and their frames in order of arrival."""

    def __init__(self, table: WorkerTable, model: str, ceiling: int, target_seconds: float, is_silent: Callable[[], bool]) -> None:
        super().__init__(table, model, ceiling, target_seconds, is_silent)
        self.frames: list[_Frame] = []
        self._poll: asyncio.TimerHandle | None = None
        self._max_active, self._active = 0, CallerCounts(table, f"frames:{model}")
        self._sum, self._next, self._looked_at = (table.column(f"{key}:{model}") for key in ("frames", "next frame", "frame time"))

    async def admit_frame(self, caller: Caller, stream: str, began: float, deadline: Deadline, parallel_images: int) -> Permit:
        """Admit a frame whose request began then, of `monotonic`; raises Superseded for a newer one, TurnMissed, and as `check`."""
        name, self._max_active = SEPARATOR.join((self._model, caller.name, stream)), 2 * parallel_images
        frame = _Frame(caller, self._active.columns[caller.name], name, began)
        waiting = [other.key for other in self.frames if other.caller.name == caller.name]
        is_full = frame.key not in waiting and len(waiting) + len(self.frames) >= _MAX_WAITING
        is_late = deadline.remaining <= 0  # it would take the place of an older one, and get none
        if not is_late and (is_full or (self.is_silent() and self._active.total >= self._max_active)):
            raise self.full(caller)
        try:
            if not is_late:
                self._waits(frame)
                self.frames.append(frame)
                self._look()
            return await wait_for_lease(frame.permit, deadline.remaining)
        except TimeoutError:
            raise TurnMissed("the turn of its stream did not come in time") from None
        finally:
            self._end_turn(frame)

    def _end_turn(self, frame: _Frame) -> None:
        cells = self._table.shared[frame.cells]
        if cells.tolist()[:2] == [frame.key, frame.began]:  # there is no newer one
            cells[2] = _NO_TURN

    def _waits(self, frame: _Frame) -> bool:
        """Tell all workers of a frame, which gets the turn of an older one; return False if it waits no more, or is the older."""
        shared, key = self._table.shared, frame.key
        if frame.permit.done() or shared[frame.cells].tolist() == [key, frame.began, frame.turn]:
            return not frame.permit.done()
        # Those of the stream; or of the oldest frame, whose worker may have been killed, or else takes other ones.
        starts = ((key + n) % _STREAMS * 3 for n in range(4))
        start = min(starts, key=lambda start: (shared[start] != key, shared[start + 1]))
        frame.cells = slice(start, start + 3)
        if shared[start] == key:
            if shared[start + 2] >> 46 == frame.turn >> 46:  # another caller's may be there after a worker was killed
                frame.turn = min(frame.turn, shared[start + 2])
            if shared[start + 1] > frame.began:
                frame.permit.set_exception(Superseded("a newer image of this stream takes the place of this one"))
                return False
        shared[start], shared[start + 1], shared[start + 2] = key, frame.began, frame.turn
        return True

    def _look(self) -> None:
        """Answer the frames for which there are newer ones, and admit others while there is room."""
        if self._poll is not None:
            self._poll.cancel()
        self._table.set(self._looked_at, int(monotonic() * _TICKS_PER_SECOND))
        self.frames = sorted(filter(self._waits, self.frames), key=lambda frame: -frame.turn)
        while self._admit_next():
            pass
        if self.frames or self._active.in_worker:
            self._poll = asyncio.get_running_loop().call_later(_POLL_SECONDS, self._look)

    def _admit_next(self) -> bool:
        firsts = {frame.caller: frame for frame in self.frames}  # what comes last stays
        for frame in sorted(firsts.values(), key=lambda frame: self._rank(frame.turn)):
            caller, rank = frame.caller, self._rank(frame.turn)
            if 0 < rank[1] < self._max_active <= rank[1] + self._part(caller).counts.of(caller) - self._active.of(caller):
                continue
            self._table.set(self._next, frame.turn)
            is_first = rank <= min(map(self._rank, filter(None, self._living_values(self._next))), default=rank)
            if not is_first or sum(self._living_values(self._sum)) >= self._max_active:
                return False
            if (permit := self.try_admit(caller)) is not None:
                self._end_turn(frame)
                self._active.add(caller, 1)
                permit.on_release(partial(self._active.add, caller, -1))
                permit.on_release(partial(asyncio.get_running_loop().call_soon, self._look))  # after the others
                self.frames.remove(frame)
                frame.permit.set_result(permit)
                return True
        self._table.set(self._next, 0)
        return False

    def _rank(self, turn: int) -> tuple[int, int, int]:
        return turn >> 60, sum(self._living_values(turn >> 46 & 0x3FFF)), turn & (1 << 46) - 1

    def _living_values(self, column: int) -> list[int]:
        since = (monotonic() - _HUNG_SECONDS) * _TICKS_PER_SECOND
        return [value for value, at in zip(*map(self._table.values, (column, self._looked_at)), strict=True) if at > since]
