"""Run inferences, and keep track of those whose request has timed out or was cancelled."""

import asyncio
import math
from collections.abc import Callable
from typing import NamedTuple

from app.errors import DeadlinePassed
from app.model.spec import ModelSpec
from app.pipeline.batch import PendingImage
from app.pipeline.batcher import LATE, Batcher
from app.pipeline.call import CallContext
from app.pipeline.triton_calls import TritonCalls
from app.resilience.model_queue import Permit
from app.triton.messages import InferResult
from app.triton.transport import InputBuffer


class Aggregation(NamedTuple):
    """Which images go to Triton together."""

    is_on: bool
    """Whether any do."""
    calls: int
    """Calls for one model that all workers of a host may have under way at one Triton; 0: one more than Triton runs at a time."""
    workers: Callable[[], int]
    """How many workers there are."""

    def max_calls(self, spec: ModelSpec) -> float:
        """Return how many calls for a model this worker may have under way at one Triton.

        No limit where waiting would not make a batch: Triton's own queue is nearer to the model.
        """
        if not self.is_on or spec.max_batch == 1:
            return math.inf
        return math.ceil((self.calls or spec.instances + 1) / max(1, self.workers()))


class InferenceRunner:
    """Runs the inferences of one worker, those of each model in batches."""

    def __init__(self, calls: TritonCalls) -> None:
        self._calls = calls
        self.batchers: dict[str, Batcher] = {}
        """By reference: a batch never has images for different versions of a model."""

    async def run(self, spec: ModelSpec, buffer: InputBuffer, call: CallContext, permit: Permit) -> InferResult:
        """Run the inference of one image.

        Args:
            spec: Spec of the model.
            buffer: The model's input.
            call: What goes with the request. After its deadline the call that the image is in goes on.
            permit: What the request uses; kept until the call has ended, and told how long that took.

        Raises:
            DeadlinePassed: No answer in time.
            GatewayError: As `TritonCalls.infer` says.
        """
        if call.deadline.remaining <= 0:
            raise DeadlinePassed(LATE)
        batcher = self.batchers.get(spec.reference)
        if batcher is None:
            batcher = self.batchers[spec.reference] = Batcher(self._calls)
        return await batcher.run(PendingImage(spec, buffer, call, permit))

    def send(self) -> None:
        """Let images go that may go by now: a Triton may have come back. To be called regularly."""
        for batcher in self.batchers.values():
            batcher.send()

    async def close(self, seconds: float) -> None:
        """Let abandoned calls end: until then Triton reads their slots, and could not survive the end of the connection.

        Not those whose circuit is open, which may never end.
        """
        tasks = [task for batcher in self.batchers.values() for task in batcher.tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        await self._calls.close()
