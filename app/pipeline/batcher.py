"""Let the images of one model go to Triton, few calls at a time."""

import asyncio
import copy
from functools import partial
from typing import NamedTuple, Protocol

from app.errors import DeadlinePassed, GatewayError, InferenceFailed, InvalidModelOutput, ModelNotReady
from app.model.spec import ModelSpec
from app.pipeline.batch import Batch, PendingImage, next_batch
from app.resilience.retry_budget import RetryBudget
from app.triton.messages import InferResult
from app.triton.model_on_server import InFlightCall, ModelOnServer

# Two of the largest usual batches.
_MAX_ISOLATED = 64.0
LATE = "the model did not answer in time"

Results = list[InferResult]


class Call(NamedTuple):
    """A call that is under way."""

    batch: Batch
    task: asyncio.Task[Results]
    in_flight: InFlightCall


class Calls(Protocol):
    """Makes calls to Triton."""

    def find(self, spec: ModelSpec) -> ModelOnServer | None:
        """Find the Triton for the next call for a model; None if there are as many as allowed."""

    async def infer(self, batch: Batch, in_flight: InFlightCall) -> InferResult:
        """Make a call for a batch; raise a GatewayError if it fails."""

    def abandon(self, image: PendingImage, call: Call | None) -> None:
        """Note that a request has left without a result, whose image still waited or is in a call."""


class Batcher:
    """The images that wait for one model, and the calls for it that are under way.

    While there are fewer calls than allowed, an image leaves at once. Those that become ready meanwhile leave together when a
    call has returned. So nobody waits for a timer, and batches grow with the load.
    """

    def __init__(self, calls: Calls) -> None:
        """Start without images."""
        self._triton = calls
        self._waiting: list[PendingImage] = []
        """In order of arrival."""
        self._under_way: dict[PendingImage, Call] = {}
        self._isolation = RetryBudget(_MAX_ISOLATED)
        """Images that may be tried alone after their batch has failed. A batch has no more, so that none fails with another."""

    @property
    def waiting(self) -> int:
        """Images that wait for a call."""
        return len(self._waiting)

    @property
    def calls(self) -> int:
        """Calls that are under way, and that some request still waits for."""
        return len({call.task for call in self._under_way.values() if not call.batch.is_abandoned})

    @property
    def tasks(self) -> set[asyncio.Task[Results]]:
        """All calls that are under way at a Triton that works; those at others may never end."""
        return {call.task for call in self._under_way.values() if call.in_flight.served.is_usable}

    async def run(self, image: PendingImage) -> InferResult:
        """Return the result of an image.

        Raises:
            DeadlinePassed: There was none in time.
            GatewayError: As the call says.
        """
        self._isolation.note_request()
        self._waiting.append(image)
        self.send()
        # A timer costs half of what `asyncio.timeout` does.
        timer = asyncio.get_running_loop().call_later(image.call.deadline.remaining, self._expire, image)
        try:
            return await image.result
        except asyncio.CancelledError:
            self._leave(image)
            raise
        finally:
            timer.cancel()
            del image, timer  # the result refers to an exception, whose traceback refers to this frame

    def _expire(self, image: PendingImage) -> None:
        """Let an image go whose deadline has passed."""
        if not image.result.done():
            image.result.set_exception(DeadlinePassed(LATE))
            self._leave(image)

    def send(self) -> None:
        """Let images go, as long as there are some and calls are allowed."""
        self._waiting = [image for image in self._waiting if not image.result.done()]
        while self._waiting and (served := self._triton.find(self._waiting[0].spec)) is not None:
            spec = served.server.specs.known(self._waiting[0].spec)
            max_images = max(1, min(spec.max_batch, self._isolation.saved))
            batch = next_batch(self._waiting, max_images, served.server.regions.__contains__)
            in_flight = InFlightCall(served, len(batch.images))
            task = asyncio.create_task(self._call(batch, in_flight))
            call = Call(batch, task, in_flight)
            for image in batch.images:
                self._waiting.remove(image)
                self._under_way[image] = call
                image.permit.keep_for(task)
                image.call.timing.lap("batch", str(len(batch.images)))
            task.add_done_callback(partial(self._end, batch, in_flight))

    async def _call(self, batch: Batch, in_flight: InFlightCall) -> Results:
        result = await self._triton.infer(batch, in_flight)
        return result.split(batch.spec, len(batch.images))

    def _end(self, batch: Batch, in_flight: InFlightCall, task: asyncio.Task[Results]) -> None:
        """Give each image its result, or another try."""
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
            self._waiting[:0] = [image for _, image in asked]
        else:
            for _, image in asked:
                image.result.set_exception(_copy(error))
        self.send()

    def _leave(self, image: PendingImage) -> None:
        """Forget an image whose request has left."""
        call = self._under_way.get(image)
        if call is not None and call.batch.is_abandoned:
            call.in_flight.leave()  # it may never end
            self.send()
        elif image in self._waiting:
            self._waiting.remove(image)
        self._triton.abandon(image, call)


def _may_be_one_image(error: BaseException | None, batch: Batch) -> bool:
    """Return whether a single image can be the cause of an error: by what is in it, or by a version that is not there any more."""
    return isinstance(error, InferenceFailed | InvalidModelOutput) or (isinstance(error, ModelNotReady) and batch.is_pinned)


def _copy(error: BaseException) -> BaseException:
    """Copy an error, so that the requests that it is raised in do not refer to each other."""
    if not isinstance(error, GatewayError):  # which may need more than its arguments
        return error
    copied = copy.copy(error)
    copied.__cause__ = error.__cause__
    return copied
