"""Images of batch requests that wait to be admitted to one model, behind all single requests."""

import asyncio

from app.errors import DeadlinePassed
from app.resilience.deadline import Deadline
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.wait_queue import WaitQueue
from app.resilience.worker_table import WorkerTable

# Fraction of the limit for batches; the rest is always left to single requests.
_PART = 0.5


class BatchQueue:
    """Admits images of batches one by one, up to a fraction of the model's limit on the whole host."""

    def __init__(self, table: WorkerTable, queue: ModelQueue, model: str, key: str) -> None:
        """Count in a table; an API key with a share of its own is counted separately."""
        self.fraction = 1.0
        """The fraction of the limit that single requests and batches with this key may use together."""
        self._table = table
        self._queue = queue
        self._key = key
        self._active = table.column(f"batch images:{model}:{key}")
        self._waiting = table.column(f"batch images waiting:{model}:{key}")
        self._images: WaitQueue[Permit] = WaitQueue(self._enter)

    @property
    def waiting(self) -> int:
        """Number of images that wait in this worker."""
        return self._table.cells[self._waiting]

    def check(self, images: int, seconds: float) -> None:
        """Reject a batch of `images` if those ahead of it would make it miss its deadline, which is in `seconds`.

        Raises:
            GatewayFull: The batch would be too late.
        """
        ahead = self._table.total(self._waiting)
        # The estimate ignores single requests. If there are many, only the late images fail, not the batch.
        if ahead and (ahead + images) * self._queue.pace() > seconds * self.fraction:
            raise self._queue.full()

    async def admit(self, deadline: Deadline) -> Permit:
        """Admit an image in its turn.

        Raises:
            DeadlinePassed: The deadline passed first.
        """
        permit = None if self._images else self._enter()
        if permit is not None:
            return permit
        self._table.add(self._waiting, 1)
        try:
            return await self._images.wait(deadline.remaining)
        except TimeoutError:
            raise DeadlinePassed("its turn did not come in time; send fewer images, or ask for more time with timeout_ms") from None
        finally:
            self._table.add(self._waiting, -1)

    def _enter(self) -> Permit | None:
        """Admit an image if there is room and no single request is waiting."""
        self._table.add(self._active, 1)  # counted first, so that two workers never take the same place
        permit = None
        if self._table.total(self._active) <= max(1, int(self._queue.limit * self.fraction * _PART)):
            permit = self._queue.try_admit(self._key, self.fraction)
        if permit is None:
            self._table.add(self._active, -1)
        else:
            permit.on_release(self._leave)
        return permit

    def _leave(self) -> None:
        self._table.add(self._active, -1)
        if self._images:  # soon, not now: the permit's other resources are released first
            asyncio.get_running_loop().call_soon(self._images.wake)
