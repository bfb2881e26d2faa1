"""Send the images of each model to Triton in batches, a few calls at a time."""

import asyncio
import copy
from collections import Counter, defaultdict
from functools import partial

from app.errors import DeadlinePassed, GatewayError, InferenceFailed, InvalidModelOutput, ModelNotReady
from app.pipeline.batch import LATE, Batch, Call, PendingImage, next_images
from app.pipeline.triton_calls import TritonCalls
from app.resilience.fairness import FairQueue
from app.resilience.retry_budget import RetryBudget
from app.triton.messages import InferResult
from app.triton.model_on_server import InFlightCall

# Enough for two of the largest common batches.
_MAX_ISOLATED = 64.0


class Batcher:
    """Sends the images of one model to Triton.

    While fewer calls are under way than allowed, an image is sent immediately. Otherwise, images wait until a call ends and are
    sent as a batch: batches grow with the load, and no image waits for a timer. A caller that has less than its part of the images
    under way has one call of its own, beyond those that are allowed. Images of a higher priority have calls of their own, too.
    """

    def __init__(self, calls: TritonCalls) -> None:
        self._triton = calls
        self.waiting: FairQueue[PendingImage] = FairQueue()
        self._under_way_by: Counter[tuple[int, str | None]] = Counter()
        """Number of images under way by priority and caller; None for those of batches."""
        self._extra_call: InFlightCall | None = None
        """The call under way beyond those that are allowed, if there is one."""
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
        """Run the inference of an image, whose call goes on after a missed deadline; errors are those of `TritonCalls.infer`."""
        remaining = image.call.deadline.remaining
        if remaining <= 0:
            raise DeadlinePassed(LATE)
        self._isolation.note_requests()
        self.waiting.add(image)
        # A timer costs half as much as `asyncio.timeout`.
        timer = asyncio.get_running_loop().call_later(remaining, self._expire, image)
        try:
            self.send()
            return await image.result
        except asyncio.CancelledError:
            self._leave(image)
            raise
        finally:
            timer.cancel()
            del image, timer  # the image refers to its error, whose traceback refers to this frame

    def _expire(self, image: PendingImage) -> None:
        if not image.result.done():
            image.result.set_exception(DeadlinePassed(LATE))
            self._leave(image)

    def send(self) -> None:
        """Send waiting images as long as calls are allowed."""
        while (first := self.waiting.next()) is not None:
            if first.result.done():  # its request is leaving
                self.waiting.discard(first)
                continue
            is_urgent = self._is_urgent(first)
            served = self._triton.find(first.spec)
            is_extra = served is None and is_urgent and self._extra_call is None
            if is_extra:
                served = self._triton.find(first.spec, more_calls=1)
            if served is None:
                return
            if not served.may_answer_by(first.call.deadline.at):
                self._expire(first)
                continue
            spec = served.server.specs.known(first.spec)
            max_images = max(1, min(spec.max_batch, self._isolation.saved))
            images = self.waiting.in_turn()
            if is_urgent:  # those of others would make the call longer
                images = [image for image in images if image.turn.caller.name == first.turn.caller.name]
            images, slot = next_images(images, max_images, served.server.regions.mapped.__contains__)
            batch = Batch(images, slot, first.spec, is_urgent)
            in_flight = InFlightCall(served, len(images))
            task = asyncio.create_task(self._triton.infer(batch, in_flight))
            call = Call(batch, task, in_flight)
            if is_extra:
                self._extra_call = in_flight
                in_flight.leave()  # it takes the place of no other call
            self.waiting.begin(first, *[image for image in images if image is not first])
            for image in images:
                self._under_way[image] = call
                self._under_way_by[image.flow] += 1
                image.permit.keep_for(task)
                image.call.timing.lap("batch", str(len(images)))
            task.add_done_callback(partial(self._end, batch, in_flight))

    # Batches count as a caller. Images of a higher priority do not count: they may take all calls.
    def _is_urgent(self, image: PendingImage) -> bool:
        flow = image.flow
        own = self._under_way_by[flow]
        if image.turn.is_batch or own + 1 >= max(self._under_way_by.values(), default=0):  # as usual
            return False
        flows = {other: images for other, images in self._under_way_by.items() if other[0] >= flow[0]}
        callers = len(flows) + (flow not in flows)
        return own + 1 < max(flows.values(), default=0) and (own + 1) * callers <= sum(flows.values())

    def _end(self, batch: Batch, in_flight: InFlightCall, task: asyncio.Task[list[InferResult]]) -> None:
        self._forget(batch, in_flight)
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
            self.waiting.add_again([image for _, image in asked])
        else:
            for _, image in asked:
                image.result.set_exception(_copy(error))
        self.send()

    def _forget(self, batch: Batch, in_flight: InFlightCall) -> None:
        in_flight.end()
        if self._extra_call is in_flight:
            self._extra_call = None
        for image in batch.images:
            del self._under_way[image]
            self._under_way_by[image.flow] -= 1
            if not self._under_way_by[image.flow]:
                del self._under_way_by[image.flow]

    def _leave(self, image: PendingImage) -> None:
        call = self._under_way.get(image)
        if call is not None and call.batch.is_abandoned:
            call.in_flight.leave()  # the call may never end
            if self._extra_call is call.in_flight:
                self._extra_call = None
            self.send()
        else:
            self.waiting.discard(image)
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
        """Wait for calls under way, also abandoned ones: Triton reads their slots, and may crash if the connection is closed."""
        tasks = [task for batcher in self.values() for task in batcher.tasks]
        if tasks:
            await asyncio.wait(tasks, timeout=seconds)
        await self._tritons.stop_probing()


def _may_be_one_image(error: BaseException | None, batch: Batch) -> bool:
    return isinstance(error, InferenceFailed | InvalidModelOutput) or (isinstance(error, ModelNotReady) and batch.is_pinned)


def _copy(error: BaseException) -> BaseException:
    """Copy an error, so that its traceback does not connect the frames of different requests."""
    if not isinstance(error, GatewayError):  # other errors may not be copyable
        return error
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied
