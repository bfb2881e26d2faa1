"""Identical questions under way share one answer."""

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from copy import copy

from app.errors import DeadlinePassed, GatewayError, GatewayFull, InvalidParameter, Superseded, WrongTask
from app.pipeline.batch import LATE
from app.pipeline.call import Decoded
from app.resilience.deadline import Deadline
from app.resilience.fairness import NORMAL

# Questions that wait in a worker; more need a permit each, as without a cache. All are woken when the one they wait for leaves.
_MAX_WAITING = 256


_Rank = tuple[bool, int]
"""Whether a question belongs to a batch, and the priority of its caller; the lower one goes first."""


class Flights:
    """The questions of one worker that are under way, by key: the first one finds the answer, and the others wait for it."""

    def __init__(self) -> None:
        self._waiting = 0
        # An error is a result: as an exception, it would refer to the frames of the request that it has failed, and to their image.
        self._under_way: dict[Hashable, tuple[_Rank, asyncio.Future[Decoded | GatewayError | None]]] = {}

    async def run(
        self, key: Hashable, find: Callable[[], Awaitable[Decoded]], deadline: Deadline, rank: _Rank = (False, NORMAL)
    ) -> tuple[Decoded, bool]:
        """Return what `find` finds, or what it has found for another question with this key, and whether it is the latter.

        If the question that runs `find` leaves, misses its own deadline, is not admitted or does not fit a model that has replaced
        the one it was for, another one runs its own. None waits for one of a lower rank, which may itself wait behind others.
        """
        while (entry := self._under_way.get(key)) is not None and entry[0] <= rank:
            other = entry[1]
            if self._waiting >= _MAX_WAITING:
                return await find(), False
            self._waiting += 1
            try:
                await asyncio.wait([other], timeout=max(0.0, deadline.remaining))
            finally:
                self._waiting -= 1
            if not other.done():
                raise DeadlinePassed(LATE)
            if isinstance(found := other.result(), GatewayError):
                raise copy(found)
            if found is not None:
                return found, True
        own: asyncio.Future[Decoded | GatewayError | None] = asyncio.get_running_loop().create_future()
        self._under_way[key] = rank, own
        try:
            found = await find()
            own.set_result(found)
        except (DeadlinePassed, GatewayFull, InvalidParameter, Superseded, WrongTask):
            raise
        except GatewayError as error:
            own.set_result(copy(error))  # without its traceback
            raise
        finally:
            if self._under_way.get(key) == (rank, own):
                del self._under_way[key]
            if not own.done():
                own.set_result(None)
        return found, False
