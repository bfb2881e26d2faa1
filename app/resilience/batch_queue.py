"""Images of batch requests that wait to be admitted to one model, behind the single requests of their caller."""

import asyncio

from app.resilience.deadline import Deadline, TurnMissed
from app.resilience.fairness import NORMAL, Caller
from app.resilience.model_queue import ModelQueue, Permit
from app.resilience.wait_queue import WaitQueue

# Fraction of the limit for batches; the rest is left to single requests.
_PART = 0.5
# Many callers may wait for seconds. Usually an image of the same caller ends before.
_POLL_SECONDS = 0.05


class BatchQueue:
    """Admits images of batches one by one, up to a fraction of the model's limit on the whole host."""

    def __init__(self, queue: ModelQueue, caller: Caller) -> None:
        self.caller = caller
        self._queue = queue
        self._active, self._waiting = queue.batch_counts(caller)
        self._images: WaitQueue[Permit] = WaitQueue(_POLL_SECONDS)

    @property
    def waiting(self) -> int:
        """Number of images that wait in this worker."""
        return self._waiting.of_in_worker(self.caller)

    def check(self, images: int, seconds: float) -> None:
        """Raise GatewayFull if the images ahead would make a batch of `images` miss its deadline, which is in `seconds`."""
        ahead = self._waiting.until_served(self.caller, images)
        # The estimate ignores single requests. If there are many, only the late images fail, not the batch.
        if ahead > images and ahead * self._queue.pace() > seconds * self.caller.fraction:
            raise self._queue.full(self.caller)

    async def admit(self, deadline: Deadline, *, is_later_step: bool = False) -> Permit:
        """Admit an image in its turn; a part of one that other models have answered in part comes before all others."""
        permit = None if self._images else self._enter()
        if permit is not None:
            return permit
        self._waiting.add(self.caller, 1)
        try:
            return await self._images.wait(self._enter, deadline.remaining, NORMAL - is_later_step)
        except TimeoutError:
            raise TurnMissed("its turn did not come in time; send fewer images, or ask for more time with timeout_ms") from None
        finally:
            self._waiting.add(self.caller, -1)

    def _enter(self) -> Permit | None:
        self._active.add(self.caller, 1)
        permit = None
        if self._active.has_place(self.caller, max(1, int(self._queue.limit * self.caller.fraction * _PART))):
            permit = self._queue.try_admit(self.caller)
        if permit is None:
            self._active.add(self.caller, -1)
        else:
            permit.on_release(self._leave)
        return permit

    def _leave(self) -> None:
        self._active.add(self.caller, -1)
        if self._images:  # soon, not now: the permit's other resources are released first
            asyncio.get_running_loop().call_soon(self._images.wake)
