"""Send the images of each model to Triton in batches, a few calls at a time."""

import asyncio
import copy
from collections import defaultdict
from functools import partial

from app.errors import DeadlinePassed, GatewayError, InferenceFailed, InvalidModelOutput, ModelNotReady
from app.pipeline.batch import LATE, Batch, Call, PendingImage, next_batch
from app.pipeline.triton_calls import TritonCalls
from app.resilience.retry_budget import RetryBudget
from app.triton.messages import InferResult
from app.triton.model_on_server import InFlightCall

# Enough for two of the largest common batches.
_MAX_ISOLATED = 64.0


class Batcher:
    """Sends the images of one model to Triton.

    While fewer calls are under way than allowed, an image is sent immediately. Otherwise, images wait until a call ends and are
    sent as a batch. So batches grow with the load, and no image waits for a timer.
    """

    def __init__(self, calls: TritonCalls) -> None:
        self._triton = calls
        self.waiting: list[PendingImage] = []
        """Images that wait for a call, in order of arrival."""
        self._under_way: dict[PendingImage, Call] = {}
        self._isolation = RetryBudget(_MAX_ISOLATED)
        """Retries of single images after their batch has failed; limits batches, so that each of their images can be retried."""

    @property
    def calls(self) -> int:
        """Number of calls under way that a request still waits for."""
        return len({call.task for call in self._under_way.values() if not call.batch.is_abandoned})

    @property
    def tasks(self) -> set[asyncio.Task[list[InferResult]]]:
        """Calls under way, except at Tritons whose circuit is open, where they may never end."""
        return {call.task for call in self._under_way.values() if call.in_flight.served.is_usable}

    async def run(self, image: PendingImage) -> InferResult:
        """Run the inference of an image. Its call goes on after a missed deadline.

        Raises:
            DeadlinePassed: The result did not arrive in time.
            GatewayError: The call failed; see `TritonCalls.infer`.
        """
        if image.call.deadline.remaining <= 0:
            raise DeadlinePassed(LATE)
        self._isolation.note_request()
        self.waiting.append(image)
        self.send()
        # A timer costs half as much as `asyncio.timeout`.
        timer = asyncio.get_running_loop().call_later(image.call.deadline.remaining, self._expire, image)
        try:
            return await image.result
        except asyncio.CancelledError:
            self._leave(image)
            raise
        finally:
            timer.cancel()
            del image, timer  # the image refers to its error, whose traceback refers to this frame

    def _expire(self, image: PendingImage) -> None:
        """Fail an image whose deadline has passed."""
        if not image.result.done():
            image.result.set_exception(DeadlinePassed(LATE))
            self._leave(image)

    def send(self) -> None:
        """Send waiting images as long as calls are allowed."""
        self.waiting = [image for image in self.waiting if not image.result.done()]
        while self.waiting and (served := self._triton.find(self.waiting[0].spec)) is not None:
            spec = served.server.specs.known(self.waiting[0].spec)
            max_images = max(1, min(spec.max_batch, self._isolation.saved))
            batch = next_batch(self.waiting, max_images, served.server.regions.__contains__)
            in_flight = InFlightCall(served, len(batch.images))
            task = asyncio.create_task(self._triton.infer(batch, in_flight))
            call = Call(batch, task, in_flight)
            for image in batch.images:
                self.waiting.remove(image)
                self._under_way[image] = call
                image.permit.keep_for(task)
                image.call.timing.lap("batch", str(len(batch.images)))
            task.add_done_callback(partial(self._end, batch, in_flight))

    def _end(self, batch: Batch, in_flight: InFlightCall, task: asyncio.Task[list[InferResult]]) -> None:
        """Set the results of a call; retry its images alone if one of them may have caused its error."""
        in_flight.end()
        for image in batch.images:
            del self._under_way[image]
        asked = [(index, image) for index, image in enumerate(batch.images) if not image.result.done()]
        error = None if task.cancelled() else task.exception()
        if task.cancelled():
            for _, image in asked:
                image.result.cancel()
        elif error is None:
            results = task.result()
            for index, image in asked:
                image.result.set_result(results[index])
        elif len(batch.images) > 1 and _may_be_one_image(error, batch):
            self._isolation.spend(len(asked))
            for _, image in asked:
                image.goes_alone = True
            self.waiting[:0] = [image for _, image in asked]
        else:
            for _, image in asked:
                image.result.set_exception(_copy(error))
        self.send()

    def _leave(self, image: PendingImage) -> None:
        """Remove an image whose request has left."""
        call = self._under_way.get(image)
        if call is not None and call.batch.is_abandoned:
            call.in_flight.leave()  # the call may never end
            self.send()
        elif image in self.waiting:
            self.waiting.remove(image)
        self._triton.abandon(image, call)


class Batchers(defaultdict[str, Batcher]):
    """Batchers of one worker by model reference, created on first use. A batch has images for one version of a model only."""

    def __init__(self, calls: TritonCalls) -> None:
        super().__init__(partial(Batcher, calls))
        self._tritons = calls.pool

    def send(self) -> None:
        """Send waiting images if calls are allowed again, because a Triton has recovered. Call this regularly."""
        for batcher in self.values():
            batcher.send()

    async def close(self, seconds: float) -> None:
        """Wait for calls under way, also abandoned ones, and stop probing.

        Triton reads the slots of these calls, and may crash if the connection is closed.
        """
        tasks = [task for batcher in self.values() for task in batcher.tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        await self._tritons.stop_probing()


def _may_be_one_image(error: BaseException | None, batch: Batch) -> bool:
    """Return whether a single image can have caused an error, by its content or by requiring an unloaded version."""
    return isinstance(error, InferenceFailed | InvalidModelOutput) or (isinstance(error, ModelNotReady) and batch.is_pinned)


def _copy(error: BaseException) -> BaseException:
    """Copy an error, so that its traceback does not connect the frames of different requests."""
    if not isinstance(error, GatewayError):  # other errors may not be copyable
        return error
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied
